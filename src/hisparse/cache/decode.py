"""One decode step of one layer for the whole batch: scan the sketches, choose rows, bring them, attend, pack.

`recall_step` is the step itself, on tensors of static shapes: nothing in it waits for the device, so that a CUDA graph
can capture it. `BatchedDecode` runs it on what a layer holds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from hisparse.cache.geometry import Geometry, rounded
from hisparse.cache.pools import HostPool
from hisparse.cache.sequence import View
from hisparse.cache.tables import Packing, Step, Tables
from hisparse.ops.decode import DecodeResult, Pages, decode_attention, reserve
from hisparse.ops.fetch import HostRows, HotBuffer, fetch_rows, gather_rows, held_rows
from hisparse.ops.scan import Chosen, scan_and_select
from hisparse.ops.sketch import build_sketch
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

if TYPE_CHECKING:
    from hisparse.cache.layer import LayerStore

Split = Literal["rope", "peaks", "never"]

UNCOUNTED = 64
"""Choices recalled again of which the numbers are kept until they are added up."""


def batched(device: torch.device, geometry: Geometry) -> bool:
    """True where decode steps run for the whole batch at once: on CUDA, and wherever kernels are asked for.

    Pages whose sizes the kernels cannot read are decoded sequence by sequence.
    """
    if device.type != "cuda" and os.environ.get("HISPARSE_BACKEND", "reference") == "reference":
        return False
    formats = (geometry.kept_format, geometry.row_format)
    return all(
        fmt.tokens & (fmt.tokens - 1) == 0 and (fmt.is_raw or (fmt.head_dim % 16 == 0 and fmt.group % 8 == 0))
        for fmt in formats
    )


@dataclass(frozen=True)
class RecallRows:
    """The rows of set-aside tokens of a batch, one layer.

    codes, scales: pools of sketches, see `scan_and_select`. table: int32 [B, max_rows], count: int32 [B]: each
    sequence's rows. pool: their bytes, on the host or (uint8 [n, fmt.page_bytes]) on the device. hot: the buffer in
    front of the host; without one, rows are brought anew in every step.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor
    count: Tensor
    pool: HostRows | Tensor
    fmt: PageFormat
    bits: int
    hot: HotBuffer | None = None

    @property
    def buffers(self) -> int:
        """Hot buffers that the rows of a step are fetched through."""
        return 0 if self.hot is None else len(self.hot.sizes)


class SharedChoice:
    """The rows that one layer chose for a step, for the layers after it that recall the same ones
    (`selection.share_layers`). A choice serves the step or view that it was made for, and no other."""

    def __init__(self) -> None:
        self._batch: tuple[Step, Chosen] | None = None
        self._rows: dict[int, tuple[View, Tensor]] = {}  # by batch row

    def batch(self, step: Step) -> Chosen | None:
        """What was chosen for the whole batch."""
        return self._batch[1] if self._batch is not None and self._batch[0] is step else None

    def keep_batch(self, step: Step, chosen: Chosen) -> None:
        self._batch = step, chosen

    def row(self, row: int, view: View) -> Tensor | None:
        """int64: what was chosen for the sequence in batch row `row`."""
        made, chosen = self._rows.get(row, (None, None))
        return chosen if made is view else None

    def keep_row(self, row: int, view: View, chosen: Tensor) -> None:
        self._rows[row] = view, chosen

    @property
    def nbytes(self) -> int:
        """Bytes of the choices that are held."""
        size = sum(chosen.nbytes for _, chosen in self._rows.values())
        return size + (0 if self._batch is None else sum(x.nbytes for x in self._batch[1]))


def choose_rows(
    q: Tensor,
    rows: RecallRows,
    stats: ChannelStats,
    scaling: float,
    budget: int,
    wanted: Tensor | None = None,
    everything: bool = False,
) -> Chosen:
    """The rows that one query a sequence, q [B, Hq, D], recalls: at most `budget`, or wanted int32 [B] of each.

    everything: all rows are within the budget, so the sketches need not be read.
    """
    if everything:
        return Chosen(rows.table[:, :budget].contiguous(), rows.count)
    return scan_and_select(
        q, rows.codes, rows.scales, rows.table, rows.count, stats, scaling, rows.bits, budget, wanted
    )


def bring_rows(rows: RecallRows, chosen: Chosen, most: Sequence[int] | None = None, early: bool = False) -> Pages:
    """Pages on the device that hold the chosen rows; valid until the next call with the same hot buffer.

    most: upper bounds of ``chosen.number`` that the host knows. early: they were chosen by the scan that was launched
    last, see `fetch_rows`. Raises FormatError where the hot buffer is too small.
    """
    if isinstance(rows.pool, Tensor):
        return Pages(rows.pool, chosen.rows, chosen.number, rows.fmt)
    if rows.hot is not None:
        table = fetch_rows(rows.hot, rows.pool, chosen.rows, chosen.number, most, early=early)
        return Pages(rows.hot.buffer, table, chosen.number, rows.fmt)
    batch, budget = chosen.rows.shape
    table = torch.arange(batch * budget, dtype=torch.int32, device=chosen.rows.device).view(batch, budget)
    return Pages(gather_rows(rows.pool, chosen.rows, chosen.number), table, chosen.number, rows.fmt)


def can_start_early(rows: RecallRows) -> bool:
    """True where there is something to scan: then kernels of the scan lie between the step's inputs and its attention,
    which need not wait for them (see `decode_attention`)."""
    return rows.table.numel() > 0 and len(rows.codes) > 0


def held_pages(rows: RecallRows) -> Pages:
    """Pages of all that the hot buffer holds, for the steps between two scans; valid until the next `bring_rows`."""
    assert rows.hot is not None
    return Pages(rows.hot.buffer, *held_rows(rows.hot), rows.fmt)


def add_recent(chosen: Chosen, recent: Chosen | None, limit: Tensor, room: int, capacity: int) -> Chosen:
    """The chosen rows, then those of `recent` that are not among them, at most limit int32 [B] in all.

    room: columns of the result, no less than any limit. capacity: row ids are below.
    """
    batch, budget = chosen.rows.shape
    device = chosen.rows.device
    new = torch.arange(budget, device=device) < chosen.number[:, None]
    rows, there = chosen.rows, new
    if recent is not None:
        taken = torch.zeros(capacity + 1, dtype=torch.bool, device=device)  # a row has one sequence, so one mark a row
        taken[torch.where(new, chosen.rows, capacity).long()] = True
        old = torch.arange(recent.rows.shape[1], device=device) < recent.number[:, None]
        rows, there = torch.cat([rows, recent.rows], 1), torch.cat([new, old & ~taken[recent.rows.long()]], 1)
    place = there.cumsum(1) - 1
    there = there & (place < limit[:, None])
    joined = rows.new_zeros(batch, room + 1).scatter_(1, torch.where(there, place, room), rows)
    return Chosen(joined[:, :room].contiguous(), there.sum(1, dtype=torch.int32))


def recall_step(
    q: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    dense_len: Tensor,
    kept: Pages | None,
    rows: RecallRows | None,
    stats: ChannelStats | None,
    scaling: float,
    budget: int,
    wanted: Tensor | None = None,
    *,
    split: Split | None = None,
    page_mass: bool = False,
) -> DecodeResult:
    """One new token a sequence attends to its dense slots, its kept pages and the rows that its query recalls.

    q: [B, Hq, D]; dense_k, dense_v: [B, H, S, D] of which dense_len int32 [B] are in use, the new token among them;
    kept: pages; rows: what may be recalled, None for nothing; budget: rows of a sequence at most, static; wanted: int32
    [B], how many of each (None: the budget). split, page_mass: see `decode_attention`. Raises FormatError for what does
    not fit together.
    """
    recalled = early = None
    if rows is not None and stats is not None:
        early = reserve(q, dense_k, rows.buffers) if can_start_early(rows) else None
        chosen = choose_rows(q, rows, stats, scaling, budget, wanted)
        recalled = bring_rows(rows, chosen, early=early is not None)
    return decode_attention(
        q, dense_k, dense_v, dense_len, kept, recalled, stats, scaling, page_mass=page_mass, split=split, early=early
    )


class BatchedDecode:
    """What one layer keeps between decode steps beside its bytes: the hot buffer and, with a scan interval, the rows of
    the last scans.

    `tables` and `shared` are shared by all layers. What is counted on the device is read by `counts`.
    """

    def __init__(self, tables: Tables, shared: SharedChoice) -> None:
        self.tables, self.shared = tables, shared
        self.hot: HotBuffer | None = None
        self.chosen: Chosen | None = None  # of the last scan
        self.recent: Chosen | None = None  # of the last scans, where no hot buffer tells
        self.held: Pages | None = None  # what the hot buffer held after the last scan
        self.most: tuple[int, ...] = ()  # as Step.most, at the last scan
        self.filled: Tensor | None = None  # the buffer that the last scan's rows went to
        self.repeated = torch.zeros(tables.batch, dtype=torch.int64, device=tables.device)  # rows, between scans
        self.uncounted: list[tuple[Tensor, int]] = []  # rows, and the steps that recalled them, to be added to these
        self.past = (0, 0)  # counts of hot buffers given up

    @torch.no_grad()
    def attend(self, store: LayerStore, q: Tensor, k: Tensor, v: Tensor, step: Step, scaling: float) -> Tensor:
        """q [B, Hq, 1, D]; k, v [B, H, 1, D], which join the dense slots. Returns [B, Hq, 1, D]."""
        store.dense_k[step.batch, :, step.place] = k[:, :, 0]
        store.dense_v[step.batch, :, step.place] = v[:, :, 0]
        query = q[:, :, 0]
        kept = None
        if step.has_pages:
            kept = Pages(store.kept.data, self.tables.pages, step.page_count, store.page_format)
        recalled = early = None
        if step.has_rows:
            rows = self._rows(store, step)
            if self._scans(store, step) and can_start_early(rows):
                early = reserve(query, store.dense_k, rows.buffers)
            recalled = self._recall(store, rows, query, step, scaling, early is not None)
        split = store.geometry.config.vtq.split
        return decode_attention(
            query, store.dense_k, store.dense_v, step.dense_len, kept, recalled, store.stats, scaling, split=split,
            early=early,
        ).out[:, :, None]  # fmt: skip

    def _scans(self, store: LayerStore, step: Step) -> bool:
        following = not store.leads and self.shared.batch(step) is not None
        return not step.everything and not following and (step.scan or self.chosen is None)

    def _recall(
        self, store: LayerStore, rows: RecallRows, query: Tensor, step: Step, scaling: float, early: bool
    ) -> Pages:
        assert store.stats is not None  # rows exist, so something was packed
        selection = store.geometry.config.selection
        store.recalled.steps += len(step.most)
        if self.chosen is not None and not step.scan and not step.everything:
            return self._recall_again(rows, self.chosen)
        followed = None if store.leads else self.shared.batch(step)
        chosen = followed or choose_rows(
            query, rows, store.stats, scaling, step.budget, step.wanted, everything=step.everything
        )
        if selection.share_layers > 1:
            self.shared.keep_batch(step, chosen)
        store.recalled.count(sum(step.most), selection.row_size, store.row_format.page_bytes)
        pages = bring_rows(rows, chosen, step.most, early)
        self.held, self.most, self.filled = None, step.most, pages.pool
        if selection.scan_interval > 1 and not step.everything:
            if rows.hot is None:
                factor = max(1.0, selection.hot_factor)
                room = rounded(int(factor * max(step.most)))
                limit = (step.wanted * factor).int()
                self.recent = add_recent(chosen, self.recent, limit, room, store.row_ids.capacity)
            self.chosen = chosen
        else:
            self.chosen = self.recent = None
        return pages

    def _recall_again(self, rows: RecallRows, chosen: Chosen) -> Pages:
        """The rows of the last scans: all that the hot buffer holds, or those remembered."""
        if rows.hot is None:
            pages = bring_rows(rows, self.recent or chosen)
        else:
            if self.held is None or self.held.pool is not rows.hot.buffer:
                if self.filled is not rows.hot.buffer:  # a new one, of another size
                    bring_rows(rows, chosen, self.most)
                    self.filled = rows.hot.buffer
                self.held = held_pages(rows)
            pages = self.held
        self._count_again(pages.count)
        return pages

    def _count_again(self, number: Tensor) -> None:
        """One more step recalls `number` int32 [B] rows. They are added up later, many steps at once: a launch in every
        step would stand between its attention and what follows."""
        steps = 1
        if self.uncounted and self.uncounted[-1][0] is number:
            steps += self.uncounted.pop()[1]
        self.uncounted.append((number, steps))
        if len(self.uncounted) == UNCOUNTED:
            self._add_up()

    def _add_up(self) -> None:
        for steps in {steps for _, steps in self.uncounted}:
            numbers = torch.stack([number for number, taken in self.uncounted if taken == steps])
            self.repeated += steps * numbers.sum(0)
        self.uncounted = []

    def _rows(self, store: LayerStore, step: Step) -> RecallRows:
        pool = store.rows.source if isinstance(store.rows, HostPool) else store.rows.data
        if not any(step.hot) or isinstance(pool, Tensor):
            self.drop_hot()
        else:
            capacity = store.row_ids.capacity
            with torch.inference_mode(False):  # tensors made in inference mode could not be written outside it
                if self.hot is None or self.hot.sizes != step.hot:
                    self.drop_hot()
                    self.hot = HotBuffer.empty(step.hot, pool.row_bytes, capacity, store.device)
                self.hot = self.hot.with_rows(capacity)
        return RecallRows(
            store.sketch_codes.data,
            store.sketch_scales.data,
            self.tables.rows,
            step.row_count,
            pool,
            store.row_format,
            store.geometry.config.selection.sketch_bits,
            self.hot,
        )

    def drop_hot(self) -> None:
        """Give up the hot buffer; its counts stay."""
        if self.hot is not None:
            self.past = self._counted()
            self.hot = self.held = self.filled = None

    def _counted(self) -> tuple[int, int]:
        found, read = (0, 0) if self.hot is None else self.hot.counters.sum(0).tolist()
        return self.past[0] + found, self.past[1] + read

    def counts(self) -> tuple[int, int, int]:
        """Rows that scans chose and the hot buffer held, those that had to be read from the host, and rows recalled in
        steps between scans. Waits for the device."""
        self._add_up()
        return *self._counted(), int(self.repeated.sum())

    @torch.no_grad()
    def commit(self, store: LayerStore, step: Step) -> None:
        """Pack what fills pages and rows, and close the gaps in the dense slots."""
        if step.pages is not None:
            store.kept.ensure(store.page_ids.capacity)
            store.kept.write(step.pages.ids, self._pack(store, step.pages, store.page_format))
        if step.rows is not None:
            keys = self._take(store.dense_k, step.rows)
            codes, scales = build_sketch(keys, store.stats, store.geometry.config.selection.sketch_bits)  # type: ignore[arg-type]
            pages = self._pack(store, step.rows, store.row_format)
            store.write_rows(step.rows.ids, step.rows.span, pages, codes, scales)
        if step.remain is not None:
            index = step.remain[:, None, :, None].expand(store.dense_k.shape)
            store.dense_k.copy_(store.dense_k.gather(2, index))
            store.dense_v.copy_(store.dense_v.gather(2, index))

    @staticmethod
    def _take(dense: Tensor, packing: Packing) -> Tensor:
        """[n, tokens, H, D] of dense slots [B, H, S, D]."""
        return dense[packing.batch, :, packing.slots]

    def _pack(self, store: LayerStore, packing: Packing, fmt: PageFormat) -> Tensor:
        return store.pack(
            self._take(store.dense_k, packing), self._take(store.dense_v, packing), fmt, self.tables.faults
        )

    @property
    def nbytes(self) -> int:
        """Device bytes of the hot buffer, of counts, and of choices kept for the next steps."""
        size = self.repeated.nbytes + sum(number.nbytes for number, _ in self.uncounted)
        size += 0 if self.hot is None else self.hot.nbytes
        for choice in (self.chosen, self.recent):
            size += 0 if choice is None else choice.rows.nbytes + choice.number.nbytes
        return size + (0 if self.held is None else self.held.table.nbytes + self.held.count.nbytes)
