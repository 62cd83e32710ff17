"""Configuration files: what is refused, in words that name the key, and laws that hold for every accepted number."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
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
        ('{"selection": {"sketch_bit": 1}}', 'did you mean "selection.sketch_bits"'),
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


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ('"evicts": 1', "evict"),
        ('"page_size": 4', "vtq.page_size"),
        ('"pagesize": 4', "vtq.page_size"),
        ('"vtq": {"page_siz": 4}', "vtq.page_size"),
        ('"vtq": {"sketch_bits": 4}', "selection.sketch_bits"),
        ('"tlif": {"treshold_base": 0.3}', "tlif.threshold_base"),
        ('"zzz": 1', None),
        ('"self": 1', None),
        ('"": {}', None),
    ],
)
def test_the_nearest_known_key_is_suggested(tmp_path: Path, key: str, meant: str | None) -> None:
    path = tmp_path / "c.json"
    path.write_text(f"{{{key}}}")
    with pytest.raises(ConfigError, match='unknown key "') as caught:
        HiSparseConfig.load(path)
    assert (f'(did you mean "{meant}"?)' in str(caught.value)) == (meant is not None)
    assert ("did you mean" in str(caught.value)) == (meant is not None)
    assert 'see "Your own configuration" in README.md' in str(caught.value)


def test_the_place_that_errors_point_at_exists() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    assert "\n## Your own configuration\n" in readme.read_text(encoding="utf-8")


def test_a_json_of_something_else_is_refused_in_a_short_line(cli: Any, tmp_path: Path) -> None:
    data = {
        **{f"key {i}": {"nested": list(range(100))} for i in range(50)},
        "vtq": {"page_size": "x" * 10_000, **{str(i): i for i in range(50)}},
        "tlif": [1, 2],
        "evict": ["host"],
        "blgs": {"min_block_size": 3.5, "max_block_size": True},
    }
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data))
    code, out, err = cli("plan-blocks", "--tokens", 100, "--config", path)
    assert (code, out) == (2, "")
    assert len(err) - len(str(path)) < 500
    assert len(err.splitlines()) == 1
    assert '"vtq.0" = 0' in err or '"key 0" = ' in err
    assert "and 97 more" in err  # of 100 unknown keys
    assert "and 2 more" in err  # of 5 wrong values


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=30), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(["vtq", "tlif", "blgs", "evict", "budget", "hidden_size", "self", "data"]) | st.text(
    max_size=200
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.dictionaries(KEYS, JSON, max_size=8) | JSON)
def test_any_json_is_a_configuration_or_refused_in_a_short_line(data: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    refused, config = "", None
    try:
        config = HiSparseConfig.load(path)
    except ConfigError as error:
        refused = str(error)
    if config is None:
        assert refused.startswith(f"config {path}: ")
        assert len(refused) - len(str(path)) < 900
    else:
        assert set(data) <= set(HiSparseConfig.model_fields)
        assert HiSparseConfig.model_validate_json(config.dump()) == config


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
