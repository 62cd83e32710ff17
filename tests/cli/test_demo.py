"""The demonstration: its parts, and a short run of the whole on the real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.cli import demo

TEXTS = st.lists(st.text(st.characters(codec="ascii", exclude_characters="\n"), max_size=20), max_size=12)


@given(TEXTS, st.floats(0, 1))
def test_a_hidden_fact_is_a_paragraph_of_its_own_and_nothing_is_lost(paragraphs: list[str], depth: float) -> None:
    text = "\n\n".join(paragraphs)
    hidden = demo.hide(text, demo.FACT, depth)
    assert hidden.count(demo.FACT) == 1
    before, after = hidden.split(demo.FACT)
    assert before.endswith("\n\n")
    assert before[:-2] + after == text
    assert after == "" or after.startswith("\n\n") or before == "\n\n"


def test_the_question_can_be_answered_from_the_fact_alone() -> None:
    assert demo.ANSWER in demo.FACT
    assert demo.ANSWER not in demo.QUESTION


def test_a_folder_that_cannot_be_made_is_named(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, _, err = cli("demo", "--out", tmp_path / "file" / "below")
    assert code == 2
    assert "below" in err
    assert err.startswith("error: --out")


@pytest.mark.real_model
def test_a_quick_run_finds_the_fact_and_writes_its_figures(cli: Any, tmp_path: Path) -> None:
    code, stdout, err = cli("demo", "--quick", "--out", tmp_path / "out")
    assert code == 0, err
    figures = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert figures["searched"]["found"]
    assert demo.ANSWER in figures["searched"]["text"]
    assert demo.ANSWER in stdout
    assert (tmp_path / "out" / "demo-plan.png").read_bytes().startswith(b"\x89PNG")
    for part in ("continued", "searched"):
        assert figures[part]["tokens"]["set_aside"] > 0
        assert 0 <= figures[part]["dense"]["mean_kl"] < 0.1
