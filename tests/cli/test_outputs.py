"""Files that commands write: who may read them, and that what cannot be written is refused before the work."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.models.fetch import usual_modes


@pytest.fixture(params=[0o022, 0o027, 0o077])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """The mode of a new file under this umask."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_calibration_has_the_mode_that_the_umask_gives(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path, mode: int
) -> None:
    out = tmp_path / "tiny.calibration.safetensors"
    sizes = ("--windows", 2, "--length", 64)
    code, _, err = cli("calibrate", "--model", tiny_directory, "--corpus", text_file, "-o", out, *sizes)
    assert code == 0, err
    assert mode_of(out) == mode
    assert [path for path in tmp_path.iterdir() if path not in (out, text_file)] == []


def test_a_tlif_has_the_mode_that_the_umask_gives(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path, mode: int
) -> None:
    out = tmp_path / "tiny.tlif.safetensors"
    text_file.write_text(text_file.read_text() * 4)
    sizes = ("--tokens", 400, "--chunk", 120, "--prefix-length", 16, "--epochs", 1)
    code, _, err = cli("distill", "--model", tiny_directory, "--corpus", text_file, "-o", out, *sizes)
    assert code == 0, err
    assert mode_of(out) == mode


def test_the_files_of_a_converted_model_have_the_mode_that_the_umask_gives(tmp_path: Path, mode: int) -> None:
    for name, had in (("model.safetensors", 0o600), ("config.json", 0o644)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(had)
    usual_modes(tmp_path)
    assert {path.name: mode_of(path) for path in tmp_path.iterdir()} == {"model.safetensors": mode, "config.json": mode}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("list.json", b"[]", "no object with a list of rows"),
        ("rows.json", b'{"rows": [1]}', "no object with a list of rows"),
        ("binary.json", b"\x90\xff\x00", "no JSON"),
        ("file", b"text", "no folder"),
        ("file/x.json", None, "no folder"),
    ],
)
def test_a_results_file_that_is_none_is_refused_before_measuring(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, says: str
) -> None:
    monkeypatch.setattr("hisparse.bench.plan.run", lambda *_: pytest.fail("measured first"))
    path = tmp_path / name
    if content is None:
        path.parent.write_bytes(b"text")
    else:
        path.write_bytes(content)
    code, _, err = cli("bench", "plan", "--context", 1024, "--out", path)
    assert code == 2
    assert f"--out {tmp_path}" in err
    assert says in err
    assert content is None or path.read_bytes() == content


def test_results_are_merged_into_a_file_or_a_new_folder(cli: Any, tmp_path: Path) -> None:
    for out in (tmp_path / "a.json", tmp_path / "new"):
        for _ in range(2):
            code, _, err = cli("bench", "plan", "--context", 1024, "--out", out, "--commit", "x")
            assert code == 0, err
        (file,) = [out] if out.suffix else list(out.iterdir())
        assert len(json.loads(file.read_text())["rows"]) == 3 * (1 + torch.cuda.is_available())


def test_a_picture_of_no_known_kind_is_refused_before_planning(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hisparse.blgs.plan_blocks", lambda *_: pytest.fail("planned first"))
    for name in ("x.txt", "x"):
        code, _, err = cli("plan-blocks", "--tokens", 500, "--png", tmp_path / name)
        assert code == 2
        assert f"picture {tmp_path / name}" in err
        assert ".png" in err


def test_plan_blocks_refuses_the_configuration_of_another_model(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 4096, "tlif": {"scorer": "novelty"}}')
    given = ("-m", tiny_directory, "-c", config)
    code, _, planned = cli("plan-blocks", "--text", text_file, *given)
    assert code == 2
    code, _, generated = cli("generate", "-f", text_file, *given, "--device", "cpu")
    assert code == 2
    assert planned == generated
    assert "hidden_size = 4096, but the model's weights have 64" in planned


@pytest.mark.parametrize("length", [100, 1000, 100000])
def test_a_prefix_too_long_for_the_chunk_is_told_a_chunk_that_works(
    cli: Any, tmp_path: Path, text_file: Path, length: int
) -> None:
    out = tmp_path / "x.safetensors"
    given = ("--corpus", text_file, "-o", out, "--prefix-length", length, "--chunk", 128)
    code, _, err = cli("distill", *given)
    assert code == 2
    assert f"prefix_length = {length}" in err
    assert f"at least {length + 64}" in err
    assert ("better 1024" in err) == (length == 100)
