"""The search for a block's layout against trying everything, and block sizes that no request fills. Needs no vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.integrations.vllm.layout import BlockLayout, Counts, choose_layout

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two bits": {"selection": {"sketch_bits": 2}},
    "rows of 8, pages of 8": {"selection": {"row_size": 8}, "vtq": {"page_size": 8}},
    "rows of 16": {"selection": {"row_size": 16, "sketch_bits": 1}, "budget": {"capacity": 4}},
    "device": {"selection": {"rows": "device"}, "budget": {"capacity": 2}},
    "raw": {"vtq": {"enable_per_block_quant": False}, "budget": {"capacity": 2, "max_keep": 0.5}},
    "dropped": {"evict": "drop", "budget": {"capacity": 3}},
    "kept": {"evict": "none"},
    "no target": {"budget": {"capacity": None}},
}


def stride(size: int, record: int) -> int | None:
    return next((unit for unit in range(16, size + 1, 16) if size % unit == 0 and unit >= record), None)


def fits(layout: BlockLayout, size: int, pages: int, step: int, record: int, evict: str) -> tuple[int, ...] | None:
    """Both strides and the pages of the first block, the most of all that fit; None where none do."""
    page_stride, row_stride = stride(size, layout.page.page_bytes), stride(size, record) if record else 0
    if page_stride is None or row_stride is None or size < layout.token_bytes:
        return None

    def room(kept: int, head: int) -> int:
        rows = (layout.tokens - head - kept * layout.page.tokens) // layout.row.tokens
        return size - kept * page_stride - rows * row_stride

    if room(pages, 0) < 0:
        return None
    taken = -(-layout.head * layout.token_bytes // page_stride) * page_stride
    full = (layout.tokens - layout.head) // layout.page.tokens
    possible = [kept for kept in range(0, min(pages, full) + 1, step) if room(kept, layout.head) >= taken]
    if not possible or (evict == "none" and possible[-1] != full):
        return None
    return page_stride, row_stride, possible[-1]


def cut(layout: BlockLayout) -> tuple[int, ...]:
    return layout.page_stride, layout.row_stride, layout.first.pages


# Rings weigh so much here that blocks are best at less than a quarter of their share of the dense bytes.
@example(heads=1, dim=32, dtype=torch.bfloat16, context=1024, tokens=128, name="dropped")
@given(
    heads=st.integers(1, 4),
    dim=st.sampled_from([32, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    context=st.sampled_from([300, 1024, 8192, 131072]),
    tokens=st.sampled_from([64, 128, 192, 256]),
    name=st.sampled_from(sorted(CONFIGS)),
)
@settings(max_examples=30, deadline=None)
def test_no_other_layout_keeps_more(
    heads: int, dim: int, dtype: torch.dtype, context: int, tokens: int, name: str
) -> None:
    config = HiSparseConfig(**CONFIGS[name])
    layout = choose_layout(config, heads, dim, dtype, context, tokens)
    step = 1
    while step * layout.page.tokens % layout.row.tokens:
        step += 1
    record = 0
    if layout.has_rows:
        record = -(-(layout.code_bytes + layout.scale_bytes) // 16) * 16
        record += layout.row.page_bytes if layout.rows_on_device else 0
    size, pages, evict = layout.block_bytes, layout.other.pages, config.evict
    assert fits(layout, size, pages, step, record, evict) == cut(layout)
    assert layout.other == Counts(pages, (tokens - pages * layout.page.tokens) // layout.row.tokens if record else 0)
    target = config.budget.capacity
    if target is not None and evict != "none" and layout.capacity(context) >= target:
        most = int(config.budget.max_keep * tokens) // layout.page.tokens // step * step
        largest = int(tokens * 4 * heads * dim / target) + 16
        for other in range(16, largest, 16 * max(1, largest // 3000)):
            sized = replace(layout, block_bytes=other)
            if other < layout.token_bytes or sized.capacity(context) < target:
                continue
            assert pages == most or fits(layout, other, pages + step, step, record, evict) is None
    else:  # the smallest of so many pages
        for other in range(max(16, size - 16 * 300), size, 16):
            assert fits(layout, other, pages, step, record, evict) is None


@pytest.mark.parametrize("tokens", [8448, 65536, 1 << 20, 16 * 10**23])
def test_blocks_that_no_request_fills_are_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"^hisparse_block_tokens = {tokens}: .* more than 8192 tokens .*; use 256$"):
        choose_layout(HiSparseConfig(), 3, 64, torch.float32, 8192, tokens)


@pytest.mark.parametrize(("tokens", "context"), [(256, 40), (8192, 8192), (65536, 1 << 20)])
def test_a_block_may_be_as_large_as_a_request(tokens: int, context: int) -> None:
    """And the usual one serves the shortest of them."""
    assert choose_layout(HiSparseConfig(), 4, 128, torch.bfloat16, context, tokens).tokens == tokens
