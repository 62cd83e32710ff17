"""`hisparse calibrate`: what it says, and that its file is one the cache takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.cli import session
from hisparse.identity import ModelIdentity
from hisparse.vtq.calibration import calibration_for


def test_it_says_what_it_does_and_draws_nothing_else(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    out = tmp_path / "tiny.calibration.safetensors"
    sizes = ("--windows", 3, "--length", 64)
    code, stdout, err = cli("calibrate", "--model", tiny_directory, "--corpus", text_file, "-o", out, *sizes)
    assert code == 0, err
    assert stdout == ""
    first, last = err.splitlines()
    assert first == "Reading 3 windows of 64 tokens ..."
    assert last.startswith(f"{out}: 2 layers x 2 KV heads x 16 channels, 3 windows of 64 tokens")
    model, _ = session.open_model(str(tiny_directory), "cpu", None)
    stats = calibration_for(ModelIdentity.of(model), out)
    assert stats is not None
    assert len(stats) == 2


def test_a_model_may_be_read_in_another_dtype(cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path) -> None:
    found = []
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / f"{dtype}.calibration.safetensors"
        sizes = ("--windows", 3, "--length", 64, "--device", "cpu", "--dtype", dtype)
        code, _, err = cli("calibrate", "--model", tiny_directory, "--corpus", text_file, "-o", out, *sizes)
        assert code == 0, err
        model, _ = session.open_model(str(tiny_directory), "cpu", None)
        found.append(calibration_for(ModelIdentity.of(model), out))
    for exact, rounded in zip(*found, strict=True):
        assert rounded.k_mean.dtype == torch.float32
        assert float((rounded.k_scale / exact.k_scale - 1).abs().max()) < 0.02
        assert float((rounded.v_mean - exact.v_mean).norm() / exact.v_mean.norm()) < 0.02


@pytest.mark.parametrize("command", ["calibrate", "distill"])
@pytest.mark.parametrize(("name", "says"), [("/proc/x.safetensors", "/proc/x.safetensors"), ("y.bin", ".safetensors")])
def test_an_output_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    cli: Any, text_file: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, says: str
) -> None:
    monkeypatch.setattr("hisparse.models.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    code, _, err = cli(command, "--corpus", text_file, "-o", name)
    assert code == 2
    assert says in err


@pytest.mark.parametrize("command", ["calibrate", "distill"])
def test_an_output_among_the_weights_is_refused_before_a_model_is_loaded(
    cli: Any, tiny_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("hisparse.models.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tiny_directory)
    code, _, err = cli(command, "--model", tiny_directory, "--corpus", text_file, "-o", "m.safetensors")
    assert code == 2
    assert "another folder" in err
    assert not (tiny_directory / "m.safetensors").exists()


def test_a_span_beyond_the_models_positions_is_refused(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path
) -> None:
    out = tmp_path / "a.safetensors"
    code, _, err = cli("calibrate", "--model", tiny_directory, "--corpus", text_file, "-o", out, "--span", 1025)
    assert code == 2
    assert "--span 1025" in err
    assert "1024 or less" in err
    assert not out.exists()
