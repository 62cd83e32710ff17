"""The byte arithmetic: what is kept never takes more than the target allows, where the target can be reached."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hisparse.cache.geometry import SINKS, Geometry
from hisparse.config import HiSparseConfig
from hisparse.ops.sketch import sketch_bytes
from hisparse.vtq.format import PageFormat


def make(**config: Any) -> Geometry:
    return Geometry(3, 2, 64, torch.bfloat16, HiSparseConfig(**config))


def spent(geometry: Geometry, kept: int, graduated: int, overhead: int) -> float:
    """Device bytes of a sequence, counted from the formats: pages, tables, sketches, rows, and the rest."""
    config = geometry.config
    page, row = geometry.kept_format, geometry.row_format
    size = overhead + kept * (geometry.layers * page.page_bytes / page.tokens + 4 / page.tokens + 4)
    if config.evict == "host":
        aside = graduated - kept
        sketch = geometry.heads * (geometry.head_dim * config.selection.sketch_bits / 8 + 1)
        size += aside * (geometry.layers * sketch + 4 / row.tokens)
        if config.selection.rows == "device":
            size += aside * geometry.layers * row.page_bytes / row.tokens
    return size


configs = st.fixed_dictionaries(
    {
        "vtq": st.fixed_dictionaries(
            {
                "default_bit_width": st.sampled_from([4, 5, 6]),
                "page_size": st.sampled_from([1, 3, 8, 64]),
                "enable_per_block_quant": st.booleans(),
            }
        ),
        "selection": st.fixed_dictionaries(
            {
                "sketch_bits": st.sampled_from([1, 2]),
                "row_size": st.sampled_from([1, 4, 5]),
                "rows": st.sampled_from(["host", "device"]),
            }
        ),
        "evict": st.sampled_from(["host", "drop"]),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    config=configs,
    capacity=st.floats(1.5, 20),
    low=st.floats(0, 0.3),
    high=st.floats(0.3, 1),
    graduated=st.integers(0, 100_000),
    tail=st.integers(1, 200),
    overhead=st.integers(0, 2_000_000),
)
def test_the_limit_keeps_the_bytes_within_the_target(
    config: dict[str, Any], capacity: float, low: float, high: float, graduated: int, tail: int, overhead: int
) -> None:
    geometry = make(**config, budget={"capacity": capacity, "min_keep": low, "max_keep": high})
    context = graduated + tail
    limit = geometry.keep_limit(context, graduated, overhead)
    least, most = int(low * graduated), int(high * graduated)
    assert isinstance(limit, int)
    assert least <= limit <= most
    allowed = context * geometry.dense_token_bytes / capacity
    slack = 1e-6 * allowed + 1e-6

    def fits(kept: int) -> bool:
        return spent(geometry, kept, graduated, overhead) <= allowed + slack

    if fits(limit):
        # and it is the largest such number
        assert limit == most or not fits(limit + 1) or spent(geometry, limit + 1, graduated, overhead) > allowed - slack
    else:
        # Nothing between min_keep and max_keep meets the target: the cheapest of them is taken.
        assert not any(fits(kept) for kept in (least, (least + most) // 2, most))
        cheaper = geometry.kept_token_bytes < geometry.aside_token_bytes
        assert limit == (most if cheaper else least)


def test_no_target_keeps_up_to_the_maximum() -> None:
    geometry = make(budget={"capacity": None, "max_keep": 0.25})
    assert geometry.keep_limit(1000, 800, 10**9) == 200


def test_keeping_is_not_limited_where_it_is_cheaper_than_setting_aside() -> None:
    """Rows of one token on the device cost more than their share of a page: then keeping all costs least."""
    geometry = make(
        vtq={"page_size": 64}, selection={"row_size": 1, "rows": "device"}, budget={"capacity": 4.0, "max_keep": 1.0}
    )
    assert geometry.kept_token_bytes < geometry.aside_token_bytes
    assert geometry.keep_limit(1000, 900, 0) == 900


@settings(max_examples=60, deadline=None)
@given(graduated=st.integers(0, 5000), capacity=st.floats(1.5, 20), config=configs)
def test_the_limit_grows_with_the_target_bytes(graduated: int, capacity: float, config: dict[str, Any]) -> None:
    tight = make(**config, budget={"capacity": capacity * 1.5, "max_keep": 1.0})
    wide = make(**config, budget={"capacity": capacity, "max_keep": 1.0})
    assume(wide.kept_token_bytes > wide.aside_token_bytes)
    assert tight.keep_limit(graduated + 100, graduated, 5000) <= wide.keep_limit(graduated + 100, graduated, 5000)


def test_sizes_are_those_of_the_formats() -> None:
    sizes: dict[str, Any] = {"vtq": {"page_size": 8}, "selection": {"row_size": 4}, "tlif": {"prefix_length": 128}}
    geometry = make(**sizes)
    assert geometry.kept_format == PageFormat(8, 2, 64, 5, 5, 64)
    assert geometry.row_format == PageFormat(4, 2, 64, 5, 5, 64)
    assert geometry.dense_token_bytes == 3 * 2 * 64 * 2 * 2
    assert geometry.slots == SINKS + 128 + 8 + 4
    assert geometry.slot_bytes == 3 * 2 * 64 * 2 * 2
    assert geometry.aside_token_bytes == 3 * 2 * sketch_bytes(64, 2) + 1
    assert math.isclose(geometry.kept_token_bytes, 3 * geometry.kept_format.page_bytes / 8 + 4.5)
    raw = make(vtq={"enable_per_block_quant": False, "page_size": 8})
    assert raw.kept_format == PageFormat.raw(torch.bfloat16, 2, 64, 8)
    on_device = make(selection={"rows": "device", "row_size": 4})
    assert on_device.aside_token_bytes == geometry.aside_token_bytes + 3 * geometry.row_format.page_bytes / 4
    assert make(evict="drop").aside_token_bytes == 0


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 256])
def test_sketch_bytes(dim: int, bits: int) -> None:
    assert sketch_bytes(dim, bits) == dim * bits // 8 + 1
