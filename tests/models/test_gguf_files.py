"""GGUF files: a whole one passes, every truncated or foreign one is refused by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.errors import ModelError
from hisparse.models import load_model
from hisparse.models.gguf import check_gguf, conversion_directory, converted


def make(path: Path, tensors: int = 2) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_string("general.name", "tiny")
    for index in range(tensors):
        writer.add_tensor(f"t{index}", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("gguf") / "whole.gguf")


def test_a_whole_file_passes(whole: Path) -> None:
    check_gguf(whole)


@settings(max_examples=60)
@given(st.floats(0, 0.999))
def test_a_file_cut_anywhere_is_refused(whole: Path, share: float) -> None:
    data = whole.read_bytes()
    end = data.rstrip(b"\0")  # the padding behind the last tensor may go
    cut = whole.with_name("cut.gguf")
    cut.write_bytes(data[: int(len(end) * share)])
    with pytest.raises(ModelError, match=r"cut\.gguf: (truncated|not a GGUF)"):
        check_gguf(cut)


@given(st.binary(max_size=200).filter(lambda data: data[:4] != b"GGUF"))
def test_other_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "other.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match="not a GGUF file"):
        check_gguf(path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="without tensors"):
        check_gguf(make(tmp_path / "empty.gguf", tensors=0))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        check_gguf(tmp_path / "none.gguf")


def test_a_model_that_transformers_cannot_read_is_refused_and_leaves_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="transformers cannot read this GGUF"):
        converted(whole)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_a_conversion_is_named_after_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path))
    first, second = (conversion_directory(Path("a/model.gguf"), digit * 64) for digit in "12")
    assert first != second
    assert first.parent == tmp_path
    assert first.name.startswith("model-1111")


def test_load_model_refuses_a_truncated_file(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(whole.read_bytes()[:300])
    with pytest.raises(ModelError, match=r"half\.gguf: truncated or damaged GGUF \(300 bytes"):
        load_model(str(path))
