"""One hot buffer a layer for all requests of a batch, in front of the rows in host memory.

Requests that share a prefix share its blocks, hence rows: so the buffer is one for all of them, a row lies in it once,
and a step's requests fetch together: in one kernel in CUDA C++, else by `merge_rows` and `hand_out` around
`fetch_rows`. A row is known by the number of its record (`BlockLayout`). When it is written anew it is forgotten here
at once (`HotRows.forget`); a block that vLLM frees, or hands to a request that finds it in the prefix cache, keeps its
bytes, and so its rows may stay.

A step makes room among the first ``hot_factor`` times its own rows' slots: a small batch looks through few slots,
whatever room there is for a large one, and finds what lies beyond all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hisparse.config import SelectionConfig
from hisparse.integrations.vllm.layout import BlockLayout
from hisparse.ops._dispatch import backend_for
from hisparse.ops.fetch import HostRows, HotBuffer, fetch_rows, forget_rows

HOT_SHARE = 1 / 32
"""Most of the KV memory that hot buffers take."""
BOOKS = 8
"""Bytes that a slot takes beside its row: owner and stamp."""


class Merged(NamedTuple):
    """Rows of a batch, each once: rows int32 [1, n], of which the first number int32 [1] count; rank int32 [entries],
    where among them the row of an entry is, for the entries that claimed one."""

    rows: Tensor
    number: Tensor
    rank: Tensor


class HotSize(NamedTuple):
    """slots: of a layer, 0 for no buffer; requests: that may decode through it at once, whatever they recall; bytes: of
    a layer, with the books of `rows` numbers of records."""

    slots: int
    requests: int
    bytes: int
    rows: int


def hot_size(selection: SelectionConfig, layout: BlockLayout, budget: int, requests: int, memory: int) -> HotSize:
    """How large a layer's buffer is where that layer has `memory` bytes for blocks and buffer.

    budget: rows that a request recalls at most; requests: that may decode at once. ``hot_factor`` times what they all
    recall, as far as HOT_SHARE of the memory goes; no buffer where that is less than one request recalls.
    """
    rows = memory // layout.block_bytes * layout.rows_per_block
    room = int(memory * HOT_SHARE) - 4 * rows
    slots = min(int(selection.hot_factor * budget) * requests, room // (layout.row.page_bytes + BOOKS))
    if not layout.host_rows or slots < max(budget, 1):
        return HotSize(0, 0, 0, 0)
    slots, served = int(slots), min(requests, int(slots) // budget)
    return HotSize(slots, served, slots * (layout.row.page_bytes + BOOKS) + 4 * rows, rows)


def why_no_buffer(layout: BlockLayout, context: int) -> tuple[str, int, str]:
    """Where `hot_size` has no slots: what takes too much, more than which part of the memory, and what changes it."""
    if 4 * layout.rows_per_block > HOT_SHARE * layout.block_bytes:
        return "the list of where each row lies", round(1 / HOT_SHARE), "So it does with any memory: blocks are small"
    what = f"what one request of {context} tokens recalls"
    return what, round(1 / HOT_SHARE), "More KV memory or a shorter --max-model-len changes it"


class Claims:
    """int32 [rows]: which entry of the step in progress stands for each row. All layers use one after the other."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.entries = torch.zeros(rows, dtype=torch.int32, device=device)

    def ensure(self, rows: int) -> None:
        if rows > len(self.entries):
            self.entries = self.entries.new_zeros(rows)


class HotRows:
    """The hot buffer of one layer. each: slots that a step searches for each of its requests; requests: most of a step.

    A step may not want more rows than there are slots (`Step.limited`).
    """

    def __init__(
        self, size: HotSize, layout: BlockLayout, each: int, requests: int, claims: Claims, device: torch.device
    ) -> None:
        self.size, self.claims = size, claims
        self.all = HotBuffer.empty((size.slots,), layout.row.page_bytes, size.rows, device)
        # A step of n requests replaces rows in the first searched[n - 1] slots.
        self.searched = [min(size.slots, each * n) for n in range(1, requests + 1)]
        self.searched[-1:] = [size.slots]
        self.bounds = torch.tensor([[0, slots] for slots in self.searched], dtype=torch.int32).to(device)
        self.shared = torch.zeros(2, dtype=torch.int64, device=device)
        """Queries beyond one a step, and entries whose row another request of the step had asked for as well."""

    def ensure(self, rows: int) -> None:
        """Room for row numbers below `rows`. Not between steps that a CUDA graph has captured."""
        self.all = self.all.with_rows(rows)
        self.claims.ensure(rows)

    def bring(self, source: HostRows, records: Tensor, number: Tensor, early: bool = False) -> Tensor:
        """Bring the rows of records int32 [B, n] into the buffer, of each request the first number int32 [B].

        source: see `record_rows`. early: the choice is the scan's that was launched last (see `fetch_rows`). Returns
        int32 [B, n], their slots; undefined beyond the number. Valid until the next call.
        """
        batch = len(records)
        if batch == 1:
            return fetch_rows(self._for(1), source, records, number, early=early)
        hot, claims = self._for(batch), self.claims.entries
        if backend_for("fetch", records.device) == "cuda":
            from hisparse.ops.fetch import cuda

            if cuda.fits(records.numel(), hot.sizes[0]):
                return cuda.fetch_shared(hot, source, records, number, self.shared, early=early)
        width = min(records.numel(), hot.sizes[0])
        merged = merge_rows(records, number, claims, self.shared, width)
        slots = fetch_rows(hot, source, merged.rows, merged.number)
        return hand_out(slots, merged.rank, records, number, claims)

    def _for(self, requests: int) -> HotBuffer:
        """The buffer as a step of so many requests sees it."""
        hot, place = self.all, min(requests, len(self.searched)) - 1
        return HotBuffer(
            hot.buffer, hot.owner, hot.stamp, hot.slot_of, self.bounds[place], hot.clock, hot.counters,
            (self.searched[place],),
        )  # fmt: skip

    def forget(self, rows: Tensor) -> None:
        """The rows of records int32 [n] are written anew: what the buffer has of them is stale."""
        forget_rows(self.all, rows)

    def counts(self) -> Tensor:
        """int64 [4]: rows found, rows read, rows that several requests shared, queries. Waits for nothing."""
        return torch.cat([self.all.counters[0], self.shared[1:], self.all.clock + self.shared[:1]])


class _Windows(Sequence[Tensor]):
    """The host pool as overlapping segments: of block b its rows and so many before them that a block has records."""

    def __init__(self, pool: Tensor, blocks: int, step: int, size: int) -> None:
        self.pool, self.blocks, self.step, self.size = pool, blocks, step, size

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, block: Any) -> Any:
        return self.pool[block * self.step : block * self.step + self.size]


def record_rows(layout: BlockLayout, pool: Tensor, blocks: int, device: torch.device) -> HostRows:
    """Rows of the host as `fetch_rows` takes them, under the numbers of their records.

    pool: uint8 [host_lead + blocks * host_rows, row_bytes], the rows of all blocks behind `host_lead` others.
    """
    step = layout.host_rows * layout.row.page_bytes
    addresses = torch.arange(blocks, dtype=torch.int64, device=device) * step + pool.data_ptr()
    segments = _Windows(pool, blocks, layout.host_rows, layout.rows_per_block)
    return HostRows(segments, addresses, layout.rows_per_block, layout.row.page_bytes)  # type: ignore[arg-type]


def merge_rows(records: Tensor, number: Tensor, claims: Tensor, shared: Tensor, width: int) -> Merged:
    """The rows that a batch wants, each once; no more than `width`.

    records: int32 [B, n], of each request the first number int32 [B], none of them twice in one request. claims: int32
    [rows], whose content before does not matter; after it says which entry stands for a row. shared: int64 [2], counted
    up: see `HotRows`.
    """
    if backend_for("fetch", records.device) != "reference":
        from hisparse.integrations.vllm.kernels import merge_rows as kernel

        return Merged(*kernel(records, number, claims, shared, width))
    entry = _entries(records, number)
    row = records.flatten()[entry].long()
    claims[row] = entry.int()
    own = claims[row] == entry
    rows, rank = records.new_zeros(1, width), records.new_zeros(records.numel())
    listed = int(own.sum())
    rows[0, :listed] = row[own].int()
    rank[entry[own]] = torch.arange(listed, dtype=torch.int32, device=records.device)
    shared += torch.stack([(number > 0).sum() - 1, (~own).sum()])
    return Merged(rows, own.sum(dtype=torch.int32)[None], rank)


def hand_out(slots: Tensor, rank: Tensor, records: Tensor, number: Tensor, claims: Tensor) -> Tensor:
    """Slots int32 [B, n] of each request's rows, from those of the merged ones, int32 [1, n]; see `merge_rows`."""
    if backend_for("fetch", records.device) != "reference":
        from hisparse.integrations.vllm.kernels import hand_out as kernel

        found: Tensor = kernel(slots, rank, records, number, claims)
        return found
    entry = _entries(records, number)
    table = torch.zeros_like(records).flatten()
    table[entry] = slots[0][rank[claims[records.flatten()[entry].long()].long()].long()]
    return table.view(records.shape)


def locate_rows(layout: BlockLayout | None, records: Tensor, number: Tensor, rows: Tensor, queries: Tensor) -> Tensor:
    """Rows of the host pool (None: the device's own records) of records int32 [B, n], where there is no buffer.

    Of each request the first number int32 [B] count: the result, int32 [B, n], is undefined beyond. rows, queries:
    int64 scalars, counted up by these rows, and by the requests that want any.
    """
    if backend_for("fetch", records.device) != "reference":
        from hisparse.integrations.vllm.kernels import locate

        per_block, host_rows = (1, 1) if layout is None else (layout.rows_per_block, layout.host_rows)
        found: Tensor = locate(records, number, per_block, host_rows, rows, queries)
        return found
    rows += number.sum()
    queries += (number > 0).sum()
    return records if layout is None else layout.host_id(records)


def _entries(records: Tensor, number: Tensor) -> Tensor:
    """Numbers of the entries that count, int64."""
    there = torch.arange(records.shape[1], device=records.device) < number[:, None]
    return there.flatten().nonzero().flatten()
