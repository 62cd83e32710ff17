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

from hisparse.cache.geometry import Geometry
from hisparse.cache.pools import HostPool
from hisparse.cache.tables import Packing, Step, Tables
from hisparse.ops.decode import DecodeResult, Pages, decode_attention
from hisparse.ops.fetch import HostRows, HotBuffer, fetch_rows, gather_rows
from hisparse.ops.scan import Chosen, scan_and_select
from hisparse.ops.sketch import build_sketch
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

if TYPE_CHECKING:
    from hisparse.cache.layer import LayerStore

Split = Literal["rope", "peaks", "never"]


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


def bring_rows(rows: RecallRows, chosen: Chosen, most: Sequence[int] | None = None) -> Pages:
    """Pages on the device that hold the chosen rows; valid until the next call with the same hot buffer.

    most: upper bounds of ``chosen.number`` that the host knows. Raises FormatError where the hot buffer is too small.
    """
    if isinstance(rows.pool, Tensor):
        return Pages(rows.pool, chosen.rows, chosen.number, rows.fmt)
    if rows.hot is not None:
        table = fetch_rows(rows.hot, rows.pool, chosen.rows, chosen.number, most)
        return Pages(rows.hot.buffer, table, chosen.number, rows.fmt)
    batch, budget = chosen.rows.shape
    table = torch.arange(batch * budget, dtype=torch.int32, device=chosen.rows.device).view(batch, budget)
    return Pages(gather_rows(rows.pool, chosen.rows, chosen.number), table, chosen.number, rows.fmt)


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
    recalled = None
    if rows is not None and stats is not None:
        recalled = bring_rows(rows, choose_rows(q, rows, stats, scaling, budget, wanted))
    return decode_attention(
        q, dense_k, dense_v, dense_len, kept, recalled, stats, scaling, page_mass=page_mass, split=split
    )


class BatchedDecode:
    """What one layer keeps between decode steps beside its bytes: the hot buffer, and the last choice of rows.

    `tables` are shared by all layers. `found` and `read`: rows that were in the hot buffer, and that were not, in
    buffers given up since and in steps that used the last choice again; `hot_counts` adds what the device counted.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.hot: HotBuffer | None = None
        self.chosen: Chosen | None = None
        self.brought: Pages | None = None
        self.most: tuple[int, ...] = ()
        self.found = 0
        self.read = 0

    @torch.no_grad()
    def attend(self, store: LayerStore, q: Tensor, k: Tensor, v: Tensor, step: Step, scaling: float) -> Tensor:
        """q [B, Hq, 1, D]; k, v [B, H, 1, D], which join the dense slots. Returns [B, Hq, 1, D]."""
        store.dense_k[step.batch, :, step.place] = k[:, :, 0]
        store.dense_v[step.batch, :, step.place] = v[:, :, 0]
        query = q[:, :, 0]
        kept = None
        if step.has_pages:
            kept = Pages(store.kept.data, self.tables.pages, step.page_count, store.page_format)
        recalled = self._recall(store, query, step, scaling) if step.has_rows else None
        vtq = store.geometry.config.vtq
        return decode_attention(
            query, store.dense_k, store.dense_v, step.dense_len, kept, recalled, store.stats, scaling, split=vtq.split
        ).out[:, :, None]

    def _recall(self, store: LayerStore, query: Tensor, step: Step, scaling: float) -> Pages:
        assert store.stats is not None  # rows exist, so something was packed
        rows = self._rows(store, step)
        selection, row_bytes = store.geometry.config.selection, store.row_format.page_bytes
        again = self.chosen is not None and not step.scan and not step.everything
        if not again:
            self.chosen = choose_rows(
                query, rows, store.stats, scaling, step.budget, step.wanted, everything=step.everything
            )
            self.most = step.most
        assert self.chosen is not None
        number = sum(self.most)
        store.recalled.count(len(step.most), number, selection.row_size, row_bytes)
        if again and rows.hot is not None and self.brought is not None and self.brought.pool is rows.hot.buffer:
            self.found += number  # nothing has replaced them since
            return self.brought
        pages = bring_rows(rows, self.chosen, self.most)
        keep = selection.scan_interval > 1
        self.brought = pages if keep and rows.hot is not None else None
        if not keep:
            self.chosen = None
        return pages

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
            self.found, self.read = self.hot_counts()
            self.hot = self.brought = None

    def hot_counts(self) -> tuple[int, int]:
        """Rows that recalls found in the hot buffer, and rows that had to be read from the host. Waits for the
        device."""
        found, read = (0, 0) if self.hot is None else self.hot.counters.sum(0).tolist()
        return self.found + found, self.read + read

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
        """Device bytes of the hot buffer and of a choice that is kept for the next steps."""
        size = 0 if self.hot is None else self.hot.nbytes
        if self.chosen is not None:
            size += self.chosen.rows.nbytes
        if self.brought is not None:
            size += self.brought.table.nbytes
        return size
