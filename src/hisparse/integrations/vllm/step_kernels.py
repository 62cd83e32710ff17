"""Triton twins of a step's tables and of what a layer does before it attends; see `step` and `memory`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES = 1024
"""Table entries of a program."""
SLOTS = 8
"""Dense tokens of a program."""


@triton.jit
def _fill_table(
    p_pages, p_packed, p_ids, p_count, pages_width, pages_stride, width, first, other, per_block, skip,
    BACK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    packed = tl.load(p_packed + b)
    count = tl.where(packed > 0, first + (packed - 1) * other, 0).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(p_count + b, count)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    used = entry < tl.minimum(count, width)
    later = tl.maximum(entry - first, 0)
    divisor = tl.maximum(other, 1)
    block = tl.where(entry < first, 0, 1 + later // divisor)
    record = tl.where(entry < first, entry, later % divisor)
    record = per_block - 1 - record if BACK else tl.where(entry < first, entry + skip, record)
    page = tl.load(p_pages + b * pages_stride + tl.minimum(block, pages_width - 1), mask=used, other=0)
    tl.store(p_ids + b * width.to(tl.int64) + entry, page * per_block + record, mask=used)


def fill_table(
    pages: Tensor, packed: Tensor, ids: Tensor, count: Tensor, first: int, other: int, per_block: int, skip: int | None
) -> None:
    """The table of `hisparse.integrations.vllm.step._table`, written to ids int32 [B, n] and count int32 [B]; entries
    beyond a count are left as they are."""
    batch, width = ids.shape
    if batch:
        _fill_table[(max(1, triton.cdiv(width, ENTRIES)), batch)](
            pages, packed, ids, count, pages.shape[1], pages.stride(0), width, first, other, per_block, skip or 0,
            skip is None, ENTRIES,
        )  # fmt: skip


@triton.jit
def _renew(
    p_dense, p_block, p_slot, p_past, p_new_block, p_new_slot, p_k, p_v, p_out, p_length, slots, block_stride,
    k_stride, v_stride, HALF: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    past = tl.load(p_past + b)
    first = tl.program_id(0) * SLOTS
    if tl.program_id(0) == 0:
        tl.store(p_length + b, past + 1)
    channel = tl.arange(0, PADDED)
    inside = channel < HALF
    if first <= past:
        slot = first + tl.arange(0, SLOTS)
        there = slot < tl.minimum(past, slots)
        at = b.to(tl.int64) * slots + slot
        block = tl.load(p_block + at, mask=there, other=0)
        place = tl.load(p_slot + at, mask=there, other=0)
        source = block * block_stride + place * (2 * HALF)
        mask = there[:, None] & inside[None]
        for half in tl.static_range(2):
            x = tl.load(p_dense + source[:, None] + half * HALF + channel[None], mask=mask)
            tl.store(p_out + at[:, None] * (2 * HALF) + half * HALF + channel[None], x, mask=mask)
        if past < first + SLOTS:
            # The new token: to the ring, and behind the others.
            k = tl.load(p_k + b.to(tl.int64) * k_stride + channel, mask=inside)
            v = tl.load(p_v + b.to(tl.int64) * v_stride + channel, mask=inside)
            ring = p_dense + tl.load(p_new_block + b) * block_stride + tl.load(p_new_slot + b) * (2 * HALF)
            tl.store(ring + channel, k, mask=inside)
            tl.store(ring + HALF + channel, v, mask=inside)
            own = p_out + (b.to(tl.int64) * slots + past) * (2 * HALF)
            fits = inside & (past < slots)
            tl.store(own + channel, k, mask=fits)
            tl.store(own + HALF + channel, v, mask=fits)


def renew(
    dense: Tensor, block: Tensor, slot: Tensor, past: Tensor, new_block: Tensor, new_slot: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Write each request's new token to its ring and gather what it reads densely, the new token last.

    dense: [blocks, slots, 2, H, D], changed in place; block, slot: int64 [B, S], of which the first past int32 [B] are
    read; new_block, new_slot: int64 [B]; k, v: [B, H, D]. Returns [B, S, 2, H, D], undefined beyond ``past + 1``, and
    that number, int32 [B].
    """
    (batch, slots), (heads, dim) = block.shape, dense.shape[3:]
    half = heads * dim
    k, v = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (k.to(dense.dtype), v.to(dense.dtype)))
    out = torch.empty(batch, slots, 2, heads, dim, dtype=dense.dtype, device=dense.device)
    length = torch.empty(batch, dtype=torch.int32, device=dense.device)
    if batch:
        _renew[(triton.cdiv(slots, SLOTS), batch)](
            dense, block, slot, past, new_block, new_slot, k, v, out, length, slots, dense.stride(0), k.stride(0),
            v.stride(0), half, triton.next_power_of_2(half), SLOTS,
        )  # fmt: skip
    return out, length
