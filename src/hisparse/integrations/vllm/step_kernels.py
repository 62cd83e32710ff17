"""Triton twins of a step's tables and of what a layer does before it attends; see `step` and `memory`.

`fill_step` makes in three launches what `make_step` and `Step.limited` make in some seventy, each of which takes longer
to launch than to run.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.config import SelectionConfig
from hisparse.integrations.vllm.layout import BlockLayout
from hisparse.integrations.vllm.step import EVERYTHING
from hisparse.ops.scan.kernels import bound

ENTRIES = 1024
"""Table entries of a program."""
SLOTS = 8
"""Dense tokens of a program."""
REQUESTS = 128
"""Fewest requests that `_limit` is compiled for: as many as it has threads."""


@triton.jit(do_not_specialize=["pages_width", "pages_stride", "width", "first", "other", "per_block", "skip"])
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
    tl.store(p_ids + b.to(tl.int64) * width + entry, page * per_block + record, mask=used)


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
    p_dense, p_block, p_slot, p_past, p_new_block, p_new_slot, p_k, p_v, p_out, p_length, slots, table_stride,
    block_stride, k_stride, v_stride, HALF: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr,
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
        entry = b.to(tl.int64) * table_stride + slot
        block = tl.load(p_block + entry, mask=there, other=0)
        place = tl.load(p_slot + entry, mask=there, other=0)
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
            fits = inside & (channel * 0 + past < slots)  # of equal shapes: newer interpreters make integers of others
            tl.store(own + channel, k, mask=fits)
            tl.store(own + HALF + channel, v, mask=fits)


def renew(
    dense: Tensor, block: Tensor, slot: Tensor, past: Tensor, new_block: Tensor, new_slot: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Write each request's new token to its ring and gather what it reads densely, the new token last.

    dense: [blocks, slots, 2, H, D], changed in place; block, slot: int64 [B, S], of which the first past int32 [B] are
    read: columns of wider tables, too. new_block, new_slot: int64 [B]; k, v: [B, H, D]. Returns [B, S, 2, H, D],
    undefined beyond ``past + 1``, and that number, int32 [B].
    """
    if block.stride() != slot.stride() or block.stride(1) != 1:
        block, slot = block.contiguous(), slot.contiguous()
    (batch, slots), (heads, dim) = block.shape, dense.shape[3:]
    half = heads * dim
    k, v = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (k.to(dense.dtype), v.to(dense.dtype)))
    out = torch.empty(batch, slots, 2, heads, dim, dtype=dense.dtype, device=dense.device)
    length = torch.empty(batch, dtype=torch.int32, device=dense.device)
    if batch:
        _renew[(triton.cdiv(slots, SLOTS), batch)](
            dense, block, slot, past, new_block, new_slot, k, v, out, length, slots, block.stride(0), dense.stride(0),
            k.stride(0), v.stride(0), half, triton.next_power_of_2(half), SLOTS,
        )  # fmt: skip
    return out, length


@triton.jit
def _place(p_ring, ring_width, lead, position, TOKENS: tl.constexpr, SLOTS: tl.constexpr, PER: tl.constexpr):
    """Block and slot of a token at `position` in a request's ring; see `step.ring_place`."""
    slot = (position - lead * TOKENS) % SLOTS
    return tl.load(p_ring + tl.minimum(lead + slot // PER, ring_width - 1)).to(tl.int64), slot % PER


@triton.jit(do_not_specialize=["ring_width", "ring_stride", "pages_stride", "slots", "width"])
def _begin(
    p_pages, p_ring, p_length, p_start, p_past, p_lead, p_packed, p_block, p_slot, p_dense, p_new_block, p_new_slot,
    p_wanted, ring_width, ring_stride, pages_stride, slots, width, TOKENS: tl.constexpr, TAIL: tl.constexpr,
    HEAD: tl.constexpr, SLOTS: tl.constexpr, PER: tl.constexpr, ROOT: tl.constexpr, LEAST: tl.constexpr,
    ROW: tl.constexpr, PLACES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One request, see `step.make_step`; all but its tables of records."""
    b = tl.program_id(0).to(tl.int64)
    p_ring += b * ring_stride
    length = tl.load(p_length + b).to(tl.int64)
    new = tl.load(p_start + b + 1).to(tl.int64) - tl.load(p_start + b).to(tl.int64)
    i = tl.arange(0, TILE)
    lead = ring_width + tl.zeros((), tl.int32)
    for at in range(0, bound(ring_width), TILE):
        if at < lead:
            taken = (at + i < ring_width) & (tl.load(p_ring + at + i, mask=at + i < ring_width, other=0) != 0)
            lead = tl.minimum(lead, tl.min(tl.where(taken, at + i, ring_width), 0))
    real = (new > 0) & (lead < ring_width)
    lead = tl.where(real, lead, 0).to(tl.int64)
    past = tl.where(real, length - new, 0)
    # Rounded down: what is negative stays below nought.
    packed = tl.minimum(tl.maximum(tl.maximum(past - TAIL, 0) // TOKENS, lead), width)
    skip = tl.where(packed > 0, HEAD, 0)
    start = packed * TOKENS
    tl.store(p_past + b, past)
    tl.store(p_lead + b, lead)
    tl.store(p_packed + b, packed)
    tl.store(p_dense + b, (skip + past - start).to(tl.int32))
    own_block, own_slot = _place(p_ring, ring_width, lead, past, TOKENS, SLOTS, PER)
    tl.store(p_new_block + b, tl.where(real, own_block, 0))
    tl.store(p_new_slot + b, own_slot)
    index = tl.arange(0, PLACES)
    block, slot = _place(p_ring, ring_width, lead, start + tl.maximum(index - skip, 0), TOKENS, SLOTS, PER)
    sink = index < skip
    first = tl.load(p_pages + b * pages_stride).to(tl.int64)
    tl.store(p_block + b * slots + index, tl.where(sink, first, block), mask=index < slots)
    tl.store(p_slot + b * slots + index, tl.where(sink, index.to(tl.int64), slot), mask=index < slots)
    context = (past + new).to(tl.float64)
    root = tl.full((), ROOT, tl.float64) * tl.sqrt(context)
    budget = tl.maximum(tl.ceil(tl.minimum(root, context)), tl.full((), LEAST, tl.float64))
    tl.store(p_wanted + b, tl.ceil(budget / ROW).to(tl.int32))


@triton.jit(do_not_specialize=["batch", "most", "free", "each", "width"])
def _limit(p_wanted, p_count, batch, most, free, each, width, BATCH: tl.constexpr):
    """See `step.Step.limited`; most below nought: as many as there are. free: rows that need not be chosen."""
    b = tl.arange(0, BATCH)
    wanted = tl.minimum(tl.load(p_wanted + b, mask=b < batch, other=0), width)
    if most >= 0:
        count = tl.load(p_count + b, mask=b < batch, other=0)
        wanted = tl.minimum(wanted, count)
        everything = tl.where(count <= each, count, wanted)
        if tl.sum(everything.to(tl.int64), 0) <= free:
            wanted = everything
        total = tl.sum(wanted.to(tl.int64), 0)
        if total > most:
            wanted = (wanted.to(tl.int64) * most // total).to(tl.int32)
    tl.store(p_wanted + b, wanted, mask=b < batch)


def fill_step(
    layout: BlockLayout,
    selection: SelectionConfig,
    pages: Tensor,
    ring: Tensor,
    lengths: Tensor,
    starts: Tensor,
    target: Any,
    width: int,
    most: int | None,
    each: int = 0,
) -> None:
    """Write to `target`, a `Step` of B requests, what `make_step` gives for them, and `limited` for `most` and `each`.

    pages, ring: int32 [B, n]; lengths: int32 [B], tokens with the new ones; starts: int32 [B + 1], where each request's
    new tokens begin. Entries of tables beyond their counts are left as they are.
    """
    batch, slots = target.dense.block.shape
    if not batch:
        return
    pages, ring = (x if x.stride(1) == 1 else x.contiguous() for x in (pages, ring))
    lengths, starts = lengths.contiguous(), starts.contiguous()
    _begin[(batch,)](
        pages, ring, lengths, starts, target.past, target.lead, target.packed, target.dense.block, target.dense.slot,
        target.dense_past, target.new.block, target.new.slot, target.wanted, ring.shape[1], ring.stride(0),
        pages.stride(0), slots, width, layout.tokens, layout.tail, layout.head, layout.ring_slots, layout.ring_tokens,
        float(selection.root_factor), float(selection.min_tokens), layout.row.tokens, triton.next_power_of_2(slots),
        ENTRIES,
    )  # fmt: skip
    fill_table(
        pages, target.packed, target.kept_table, target.kept_count, layout.first.pages, layout.other.pages,
        layout.pages_per_block, layout.head_pages,
    )  # fmt: skip
    if layout.has_rows:
        fill_table(
            pages, target.packed, target.row_table, target.row_count, layout.first.rows, layout.other.rows,
            layout.rows_per_block, None,
        )  # fmt: skip
    else:
        target.row_count.zero_()
    _limit[(1,)](
        target.wanted, target.row_count, batch, -1 if most is None else most, min(most or 0, EVERYTHING), each,
        target.row_table.shape[1], max(REQUESTS, triton.next_power_of_2(batch)),
    )  # fmt: skip
