"""`hisparse serve`: what the command line refuses or warns of before vLLM starts. Needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hisparse.cli.serve import compose, unused_keys
from hisparse.config import HiSparseConfig
from hisparse.errors import InputError

MACHINE = {"gpus": 1, "memory": 0}


@pytest.mark.parametrize(
    ("model", "tokens", "said"),
    [("/nonexistent", None, "/nonexistent: no such directory"), ("./x", None, "no such directory")]
    + [("org/model", tokens, "multiple of 16") for tokens in (0, -16, 100)],
)
def test_what_cannot_be_served_is_said_at_once(model: str, tokens: int | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        compose(model, None, None, None, tokens, [], MACHINE)


def test_a_hub_id_and_a_directory_pass(tmp_path: Path) -> None:
    assert compose("org/model", None, None, None, 128, [], MACHINE)[2] == "org/model"
    (tmp_path / "config.json").write_text("{}")
    assert compose(str(tmp_path), None, None, None, None, [], MACHINE)[2] == str(tmp_path)


def test_keys_without_effect_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"selection": {"scan_interval": 2}, "blgs": {"bandwidth_weight": 0.5}}))
    compose("org/model", path, None, None, None, [], MACHINE)
    assert "vLLM does without blgs, selection.scan_interval" in capsys.readouterr().err
    assert unused_keys(HiSparseConfig()) == []
