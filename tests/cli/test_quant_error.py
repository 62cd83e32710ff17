"""`hisparse bench-quant-error`: its tables fit a terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


def test_the_worst_blocks_are_legible_in_eighty_columns(
    cli: Any, tiny_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = cli(
        "bench-quant-error", "--model", tiny_directory, "--text", text_file, "--tokens", 500, "--worst", 5
    )
    assert code == 0, err
    assert "Loading weights" not in err
    # Nobody who redirects stderr is left wondering.
    rules = ["5 rope", "5 peaks", "5 never", "4", "6"]
    assert err.splitlines() == ["Reading 500 tokens ...", *(f"Rule {rule} ..." for rule in rules)]
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    # layer, head, first and last token, and seven errors of four places
    assert len(re.findall(r"^ +\d+ +\d+ +\d+-\d+(?: +\d\.\d{4}){7} *$", out, re.MULTILINE)) == 5
