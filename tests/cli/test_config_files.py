"""Configuration files: what is refused, in words that name the key, and laws that hold for every accepted number."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.cli.generate import check_writable
from hisparse.config import HiSparseConfig, SelectionConfig, TlifConfig
from hisparse.errors import ConfigError, InputError

HUGE = 1e308


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a":', "line 1"),
        ("[1]", "top level"),
        ("[" * 200_000, "nested too deeply"),
        ('{"evict": "host", "evict": "none"}', '"evict" is given twice'),
        ('{"vtq": {"page_size": 4, "page_size": 8}}', '"page_size" is given twice'),
        ('{"selection": {"sketch_bit": 1}}', 'did you mean "sketch_bits"'),
        ('{"budget": {"capacity": "9"}}', "budget.capacity"),
        ('{"budget": {"capacity": Infinity}}', "budget.capacity"),
        ('{"budget": {"capacity": NaN}}', "budget.capacity"),
        ('{"selection": {"root_factor": 1e999}}', "selection.root_factor"),
        ('{"evict": "drop", "prefill": {"mode": "recall"}}', "leaves nothing to recall"),
    ],
)
def test_a_file_that_cannot_work_is_refused_with_the_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hi-sparse-config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        HiSparseConfig.load(path)
    assert said in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


@given(
    context=st.integers(0, 1 << 40),
    scale=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    exponent=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_every_accepted_threshold_law_gives_an_importance(context: int, scale: float, exponent: float | None) -> None:
    config = TlifConfig(threshold_scale_factor=scale, threshold_exponent=exponent)
    assert 0 <= config.threshold(context) < 1


@given(context=st.integers(0, 1 << 40), factor=st.floats(0, HUGE), least=st.integers(1, 10_000))
def test_the_recall_budget_never_needs_more_than_the_context_or_the_least(
    context: int, factor: float, least: int
) -> None:
    budget = SelectionConfig(root_factor=factor, min_tokens=least).budget(context)
    assert least <= budget <= max(least, context)
    if factor * math.sqrt(context) <= context:
        assert budget == max(least, math.ceil(factor * math.sqrt(context)))


def test_writability_is_tried_and_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []
    for path in (tmp_path, tmp_path / "missing" / "out.json", tmp_path / ("a" * 300), Path("/dev/null/out.json")):
        with pytest.raises(InputError):
            check_writable(path)
