"""Where everything lies in one engine step: the tables that all layers share, made from vLLM's block tables.

A request has two rows of block ids. `pages`: entry b is the block of tokens ``b * W .. (b + 1) * W - 1``. `ring`:
`lead` zeros, then the blocks of its ring; `lead` is the number of blocks that the request found in the prefix cache, so
that the ring holds tokens from ``lead * W`` on, token p in slot ``(p - lead * W) % ring_slots``. Block 0 is nobody's.

Attention reads the first `packed` blocks packed and the tokens after them densely. A block is packed as soon as it is
full, but a request goes on reading it densely until it lies behind the tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hisparse.config import SelectionConfig
from hisparse.integrations.vllm.layout import BlockLayout
from hisparse.ops._dispatch import backend_for

EVERYTHING = 4096
"""Rows that a step recalls without choosing, at most: attending to more would take longer than the scan."""


@dataclass(frozen=True)
class Place:
    """Dense tokens in a layer's memory: block and slot of each, int64, equal shapes."""

    block: Tensor
    slot: Tensor

    def __getitem__(self, index: object) -> Place:
        return Place(self.block[index], self.slot[index])  # type: ignore[index]


@dataclass(frozen=True)
class Step:
    """Tables of a batch of B requests, before their new tokens are written.

    past, lead, packed: int64 [B], tokens already computed, blocks found cached, blocks read packed. dense: Place [B, S]
    of the tokens read densely, sinks first, of which each request has the first dense_past int32 [B], and one more with
    its first new token. new: Place [B] of the first new token. kept_table, kept_count and row_table, row_count: int32
    [B, n] and [B], page and row records (see `BlockLayout`). wanted: int32 [B], rows to recall.
    """

    past: Tensor
    lead: Tensor
    packed: Tensor
    dense: Place
    dense_past: Tensor
    new: Place
    kept_table: Tensor
    kept_count: Tensor
    row_table: Tensor
    row_count: Tensor
    wanted: Tensor

    def select(self, rows: Tensor | slice) -> Step:
        """The tables of requests `rows`, int64 [n] or a slice."""
        return Step(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def copied(self, target: Step) -> Step:
        """The same in the first rows of `target`'s tensors, whose addresses a CUDA graph knows. Returns those rows."""
        part = target.select(slice(0, len(self.past)))
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(part, field.name)
            if isinstance(mine, Place):
                theirs.block.copy_(mine.block)
                theirs.slot.copy_(mine.slot)
            else:
                theirs.copy_(mine)
        return part

    def room(self, requests: int) -> Step:
        """Tensors of the same kinds for so many requests, zero."""

        def empty(x: Tensor) -> Tensor:
            return x.new_zeros(requests, *x.shape[1:])

        made: dict[str, Any] = {}
        for field in fields(self):
            x = getattr(self, field.name)
            made[field.name] = Place(empty(x.block), empty(x.slot)) if isinstance(x, Place) else empty(x)
        return Step(**made)

    def limited(self, most: int, each: int = 0) -> Step:
        """The same with no more than `most` rows wanted in all: where requests want more, each gets its share of it.

        each: a request that has no more rows than that wants them all, if together that makes no more than
        EVERYTHING: then nothing needs to be chosen, and after the first step the rows are in the hot buffer.
        """
        wanted = torch.minimum(self.wanted, self.row_count).long()
        everything = torch.where(self.row_count <= each, self.row_count.long(), wanted)
        wanted = torch.where(everything.sum() <= min(most, EVERYTHING), everything, wanted)
        total = wanted.sum()
        return replace(self, wanted=torch.where(total > most, wanted * most // total.clamp_min(1), wanted).int())

    def narrowed(self) -> Step:
        """The same without columns that no request uses. Waits for the device: for the CPU, and for steps that read the
        tables on the host anyway."""
        dense, kept, rows = int(self.dense_past.max()) + 1, int(self.kept_count.max()), int(self.row_count.max())
        return replace(
            self,
            dense=self.dense[:, :dense],
            kept_table=self.kept_table[:, :kept],
            row_table=self.row_table[:, :rows],
            wanted=self.wanted.clamp_max(rows),
        )


def leading(ring: Tensor) -> Tensor:
    """int64 [B]: how many zeros each row of the ring table [B, n] begins with."""
    return (ring == 0).to(torch.int64).cumprod(1).sum(1)


def ring_place(layout: BlockLayout, ring: Tensor, lead: Tensor, position: Tensor) -> Place:
    """Place of tokens at `position` int64 [B, n] in the rings of `ring` [B, m]; lead int64 [B]."""
    slot = (position - lead[:, None] * layout.tokens) % layout.ring_slots
    entry = (lead[:, None] + slot // layout.ring_tokens).clamp_max(ring.shape[1] - 1)
    return Place(ring.gather(1, entry).long(), slot % layout.ring_tokens)


def make_step(
    layout: BlockLayout,
    selection: SelectionConfig,
    pages: Tensor,
    ring: Tensor,
    past: Tensor,
    new: Tensor,
    width: int,
) -> Step:
    """Tables of one step.

    pages, ring: int32 [B, n], block tables; past, new: int64 [B], tokens computed before and in this step; width:
    blocks that tables have room for (no request reads more packed). All shapes follow from those of the arguments.

    Requests without new tokens or without a ring are padding: they read nothing and write to block 0.
    """
    device, head, tokens = pages.device, layout.head, layout.tokens
    lead = leading(ring)
    real = (new > 0) & (lead < ring.shape[1])
    lead, past = torch.where(real, lead, 0), torch.where(real, past, 0)
    packed = torch.maximum(lead, (past - layout.tail).div(tokens, rounding_mode="floor")).clamp(0, width)
    start = packed * tokens
    some = packed > 0

    index = torch.arange(head + layout.ring_slots, device=device)
    skip = torch.where(some, head, 0)[:, None]
    place = ring_place(layout, ring, lead, (start[:, None] + index - skip).clamp_min(0))
    sink = index < skip
    dense = Place(torch.where(sink, pages[:, :1].long(), place.block), torch.where(sink, index, place.slot))

    kept_table, kept_count = _table(
        pages, packed, width, layout.first.pages, layout.other.pages, layout.pages_per_block, layout.head_pages
    )
    if layout.has_rows:
        row_table, row_count = _table(
            pages, packed, width, layout.first.rows, layout.other.rows, layout.rows_per_block, None
        )
    else:
        row_table, row_count = kept_table[:, :0], torch.zeros_like(kept_count)
    new_place = ring_place(layout, ring, lead, past[:, None])[:, 0]
    context = (past + new).double()
    budget = torch.minimum(selection.root_factor * context.sqrt(), context).ceil().clamp_min(selection.min_tokens)
    return Step(
        past=past,
        lead=lead,
        packed=packed,
        dense=dense,
        dense_past=(skip[:, 0] + past - start).int(),
        new=Place(torch.where(real, new_place.block, 0), new_place.slot),
        kept_table=kept_table,
        kept_count=kept_count,
        row_table=row_table,
        row_count=row_count,
        wanted=(budget / layout.row.tokens).ceil().int().clamp_max(row_table.shape[1]),
    )


def row_budget(layout: BlockLayout, selection: SelectionConfig, context: int) -> int:
    """Most rows that a request of at most `context` tokens recalls."""
    return math.ceil(selection.budget(context) / layout.row.tokens)


def _table(
    pages: Tensor, packed: Tensor, width: int, first: int, other: int, per_block: int, skip: int | None
) -> tuple[Tensor, Tensor]:
    """Records of the first `packed` blocks: `first` of block 0, `other` of each later one; int32 [B, n], int32 [B].

    skip: records that the head of block 0 takes from the front; None counts records from the back. Entries beyond a
    count are undefined.
    """
    entries = first + max(width - 1, 0) * other
    if backend_for("decode", pages.device) != "reference":
        from hisparse.integrations.vllm.step_kernels import fill_table

        found = torch.empty(len(pages), entries, dtype=torch.int32, device=pages.device)
        number = torch.empty(len(pages), dtype=torch.int32, device=pages.device)
        fill_table(pages, packed, found, number, first, other, per_block, skip)
        return found, number
    entry = torch.arange(entries, device=pages.device)
    block = torch.where(entry < first, 0, 1 + (entry - first).clamp_min(0) // max(other, 1))
    record = torch.where(entry < first, entry, (entry - first) % max(other, 1))
    record = per_block - 1 - record if skip is None else torch.where(entry < first, record + skip, record)
    ids = pages[:, block.clamp_max(pages.shape[1] - 1)]
    count = torch.where(packed > 0, first + (packed - 1) * other, 0)
    return (ids * per_block + record).int(), count.int()
