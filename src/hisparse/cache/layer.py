"""One layer's bytes: dense slots, kept pages, rows, sketches; attention over them; packing what leaves the tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.cache.decode import BatchedDecode, SharedChoice
from hisparse.cache.geometry import Geometry
from hisparse.cache.pools import HostPool, PageIds, Pool
from hisparse.cache.sequence import Commit, View
from hisparse.cache.tables import Step, Tables
from hisparse.ops.attend import Packed, attend, attend_recalled, select_for_chunk
from hisparse.ops.fetch import forget_rows
from hisparse.ops.pack import pack_pages
from hisparse.ops.select import select_rows
from hisparse.ops.sketch import build_sketch, score_sketch
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats, estimate_stats

# Queries that are scored and recalled together when a chunk attends token by token: bounds the memory of the gathered
# rows.
QUERY_TILE = 16
# Rows that a chunk recalls for all its queries together, in multiples of what one decode step recalls.
CHUNK_BUDGET = 4


@dataclass
class Recalled:
    """What was read back from rows so far, in how many steps of one token and in how many longer chunks.

    Steps and chunks are of one sequence each: a step of a batch of three counts three.
    """

    steps: int = 0
    chunks: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0

    def begin(self, tokens: int) -> None:
        """Count a step or a chunk of `tokens` tokens that recalls."""
        if tokens == 1:
            self.steps += 1
        else:
            self.chunks += 1

    def count(self, rows: int, row_size: int, row_bytes: int) -> None:
        self.rows += rows
        self.tokens += rows * row_size
        self.bytes += rows * row_bytes


class LayerStore:
    """K and V of one layer for every sequence of a batch.

    `stats` may start as None: they are then estimated from the first tokens that are packed. With `tables`, decode
    steps run for the whole batch at once (`attend_step`), and rows on the host lie in pinned memory. place: how many
    layers of the cache come before this one; shared: what those that recall the same rows leave for each other.
    """

    def __init__(
        self,
        geometry: Geometry,
        page_ids: PageIds,
        row_ids: PageIds,
        stats: ChannelStats | None,
        order: Tensor,
        device: torch.device,
        tables: Tables | None = None,
        place: int = 0,
        shared: SharedChoice | None = None,
    ) -> None:
        self.geometry, self.place = geometry, place
        self.shared = shared or SharedChoice()
        self.page_ids, self.row_ids = page_ids, row_ids
        self.stats = None if stats is None else stats.to(device)
        self.estimated = stats is None
        self.order = order
        self.device = device
        self.page_format, self.row_format = geometry.kept_format, geometry.row_format
        self.dense_k = torch.empty((0, geometry.heads, geometry.slots, geometry.head_dim), device=device)
        self.dense_v = self.dense_k
        self.kept = Pool(self.page_format.page_bytes, device)
        self.rows: Pool | HostPool
        if geometry.config.selection.rows == "host" and (tables is not None or device.type == "cuda"):
            self.rows = HostPool(self.row_format.page_bytes, device)
        else:
            self.rows = Pool(self.row_format.page_bytes, device)
        tokens = self.row_format.tokens * geometry.heads
        self.sketch_codes = Pool(tokens * geometry.head_dim * geometry.config.selection.sketch_bits // 8, device)
        self.sketch_scales = Pool(tokens, device)
        self.recalled = Recalled()
        self.decode = None if tables is None else BatchedDecode(tables, self.shared)
        self.chosen: dict[int, Tensor] = {}  # by batch row: int32 row ids of the last scans, newest first
        self._written = 0  # no row id from here on was written yet

    # -- attention -------------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, row: int, view: View, scaling: float) -> Tensor:
        """Attention of one sequence's chunk, before the chunk is committed.

        q [Hq, T, D]; k, v [H, T, D]; `row` is the sequence's batch row, `view` what it held before the chunk. Returns
        [Hq, T, D].
        """
        if view.slots:
            dense_k, dense_v = self.dense_k[row, :, : view.slots], self.dense_v[row, :, : view.slots]
        else:
            dense_k, dense_v = k[:, :0], v[:, :0]
        kept = [Packed(self.kept.data, self.page_format, view.pages)] if view.n_pages else []
        rows, row_size = view.n_rows, self.row_format.tokens
        if not rows:
            return attend(q, k, v, dense_k, dense_v, kept, self.stats, scaling)
        chunk = q.shape[1]
        self.recalled.begin(chunk)
        wanted = -(-self.geometry.config.selection.budget(view.length + chunk) // row_size)
        if self._reads_everything(chunk, wanted, rows):
            packed = [*kept, self._all_rows(view)]
            self.recalled.count(rows, row_size, self.row_format.page_bytes)
            return attend(q, k, v, dense_k, dense_v, packed, self.stats, scaling)
        if chunk == 1:
            chosen = self._choose(q, row, view, wanted, scaling)
            packed = [*kept, Packed(self.rows.read(chosen, self.device), self.row_format)]
            self.recalled.count(len(chosen), row_size, self.row_format.page_bytes)
            return attend(q, k, v, dense_k, dense_v, packed, self.stats, scaling)
        prefill = self.geometry.config.prefill
        # Choosing once is cheaper from a few tokens on; a long chunk has no other way.
        if chunk > prefill.recall_max_tokens or (prefill.choose == "chunk" and chunk > CHUNK_BUDGET):
            return self._attend_by_choice(q, k, v, dense_k, dense_v, kept, view, CHUNK_BUDGET * wanted, scaling)
        return self._attend_token_by_token(q, k, v, dense_k, dense_v, kept, view.rows, wanted, scaling)

    def _attend_by_choice(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dense_k: Tensor,
        dense_v: Tensor,
        kept: list[Packed],
        view: View,
        wanted: int,
        scaling: float,
    ) -> Tensor:
        """The whole chunk recalls one set of rows, chosen once."""
        assert self.stats is not None  # rows exist, so something was packed
        rows = self._all_rows(view)
        if wanted < view.n_rows:
            chosen = select_for_chunk(q, *self._sketches(view.rows), self.stats, scaling, wanted)
            ids = view.rows[chosen].sort().values  # adjacent rows are read faster
            rows = Packed(rows.pages, self.row_format, ids)
        self.recalled.count(rows.count, self.row_format.tokens, self.row_format.page_bytes)
        return attend(q, k, v, dense_k, dense_v, [*kept, rows], self.stats, scaling)

    def _attend_token_by_token(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dense_k: Tensor,
        dense_v: Tensor,
        kept: list[Packed],
        ids: Tensor,
        wanted: int,
        scaling: float,
    ) -> Tensor:
        """Each query of the chunk recalls rows of its own."""
        assert self.stats is not None  # rows exist, so something was packed
        pieces = []
        for start in range(0, q.shape[1], QUERY_TILE):
            tile = q[:, start : start + QUERY_TILE]
            count = tile.shape[1]
            scores = self._scores(tile, ids, scaling)
            chosen = torch.stack(
                [select_rows(scores[:, t : t + 1], self.row_format.tokens, wanted) for t in range(count)]
            )
            pages = self.rows.read(ids[chosen].flatten(), self.device).view(count, -1, self.row_format.page_bytes)
            self.recalled.count(chosen.numel(), self.row_format.tokens, self.row_format.page_bytes)
            # The tile sees the chunk's earlier tokens as past: they join the dense slots.
            past_k, past_v = torch.cat([dense_k, k[:, :start]], dim=1), torch.cat([dense_v, v[:, :start]], dim=1)
            end = start + count
            pieces.append(
                attend_recalled(
                    tile,
                    k[:, start:end],
                    v[:, start:end],
                    past_k,
                    past_v,
                    kept,
                    Packed(pages, self.row_format),
                    self.stats,
                    scaling,
                )
            )
        return torch.cat(pieces, dim=1)

    def _all_rows(self, view: View) -> Packed:
        """Every row of a sequence, where it lies."""
        if isinstance(self.rows, HostPool):
            return Packed(self.rows.source, self.row_format, view.host_rows)
        return Packed(self.rows.data, self.row_format, view.rows)

    @property
    def leads(self) -> bool:
        """False where rows are those that a layer before this one chose."""
        return self.place % self.geometry.config.selection.share_layers == 0

    def _choose(self, q: Tensor, row: int, view: View, wanted: int, scaling: float) -> Tensor:
        """int64: the rows that one step recalls; those of the layer that leads, where that is another one."""
        followed = None if self.leads else self.shared.row(row, view)
        chosen = self._choose_own(q, row, view, wanted, scaling) if followed is None else followed
        if self.geometry.config.selection.share_layers > 1:
            self.shared.keep_row(row, view, chosen)
        return chosen

    def _choose_own(self, q: Tensor, row: int, view: View, wanted: int, scaling: float) -> Tensor:
        """int64: the rows that one step recalls; between scans those of the last scans."""
        selection, last = self.geometry.config.selection, self.chosen.get(row)
        if last is not None and not view.scan:
            return last.long()
        chosen = view.rows[self._select(q, view.rows, wanted, scaling)]
        if selection.scan_interval > 1:
            recent = chosen if last is None else torch.cat([chosen, last[~torch.isin(last, chosen)].long()])
            self.chosen[row] = recent[: int(max(1.0, selection.hot_factor) * wanted)].int()
        return chosen

    def attend_step(self, q: Tensor, k: Tensor, v: Tensor, step: Step, scaling: float) -> Tensor:
        """One new token a sequence, for the whole batch, its commit included.

        q [B, Hq, 1, D]; k, v [B, H, 1, D]. Returns [B, Hq, 1, D].
        """
        assert self.decode is not None
        out = self.decode.attend(self, q, k, v, step, scaling)
        self.decode.commit(self, step)
        return out

    def can_step(self, batch: int, step: Step) -> bool:
        """False for a first chunk, and where channel statistics have yet to be estimated."""
        packs = step.pages is not None or step.rows is not None
        return self.decode is not None and self.dense_k.shape[0] == batch and not (packs and self.stats is None)

    def _reads_everything(self, chunk: int, wanted: int, rows: int) -> bool:
        """True where attending to every row is exact and no dearer than recalling for each query, or is asked for."""
        if wanted >= rows:
            return True
        if chunk == 1:
            return False
        prefill = self.geometry.config.prefill
        return prefill.mode == "full" and (chunk > prefill.recall_max_tokens or chunk * wanted >= rows)

    @torch.no_grad()
    def _scores(self, q: Tensor, ids: Tensor, scaling: float) -> Tensor:
        assert self.stats is not None
        return score_sketch(q, *self._sketches(ids), self.stats, scaling)

    def _sketches(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of rows `ids`, as `score_sketch` takes them."""
        shape = (len(ids), self.geometry.heads, self.row_format.tokens)
        codes = self.sketch_codes.read(ids, self.device).view(*shape, -1)
        return codes, self.sketch_scales.read(ids, self.device).view(shape)

    def _select(self, q: Tensor, ids: Tensor, wanted: int, scaling: float) -> Tensor:
        return select_rows(self._scores(q, ids, scaling), self.row_format.tokens, wanted)

    # -- commit ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self, q: Tensor, k: Tensor, v: Tensor, row: int, batch: int, before: int, commit: Commit) -> None:
        """Take a chunk's k, v [H, T, D] in: fill slots, pack what is complete, free its slots.

        `before`: slots in use. q [Hq, T, D]: the chunk's queries, which statistics are estimated from where there is no
        calibration.
        """
        if self.dense_k.shape[0] != batch:
            shape = (batch, *self.dense_k.shape[1:])
            with torch.inference_mode(False):  # tensors made in inference mode could not be written outside it
                self.dense_k = torch.empty(shape, dtype=k.dtype, device=self.device)
                self.dense_v = torch.empty_like(self.dense_k)
        if commit.appends_only:
            self.dense_k[row, :, before : before + commit.chunk] = k
            self.dense_v[row, :, before : before + commit.chunk] = v
            return
        source_k = torch.cat([self.dense_k[row, :, :before], k], dim=1)
        source_v = torch.cat([self.dense_v[row, :, :before], v], dim=1)
        if self.stats is None:
            self.stats = estimate_stats(
                source_k.transpose(0, 1), source_v.transpose(0, 1), self.order, q.transpose(0, 1)
            )
        here = commit.indices(self.device)
        if len(commit.page_ids):
            self.kept.ensure(self.page_ids.capacity)
            self.kept.write(here.page_ids, self._pack(source_k, source_v, here.page_index, self.page_format))
        if len(commit.row_ids):
            pages = self._pack(source_k, source_v, here.row_index, self.row_format)
            keys = source_k[:, here.row_index].permute(1, 2, 0, 3)  # [n, R, H, D]
            sketches = build_sketch(keys, self.stats, self.geometry.config.selection.sketch_bits)
            span = int(commit.row_ids.min()), int(commit.row_ids.max())
            self.write_rows(here.row_ids, span, pages, *sketches)
        self.dense_k[row, :, : len(commit.remain)] = source_k[:, here.remain]
        self.dense_v[row, :, : len(commit.remain)] = source_v[:, here.remain]

    def write_rows(self, ids: Tensor, span: tuple[int, int], pages: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Store rows `ids` int64 [n], the lowest and highest of which is `span`: pages uint8 [n, page_bytes], and
        sketches as `build_sketch` gives them."""
        for pool in (self.rows, self.sketch_codes, self.sketch_scales):
            pool.ensure(self.row_ids.capacity)
        self.rows.write(ids, pages)
        self.sketch_codes.write(ids, codes.flatten(1))
        self.sketch_scales.write(ids, scales.flatten(1))
        if self.decode is not None and self.decode.hot is not None and span[0] < self._written:
            forget_rows(self.decode.hot, ids.int())  # some are used again: the buffer may hold what they were
        self._written = max(self._written, span[1] + 1)

    def _pack(self, source_k: Tensor, source_v: Tensor, index: Tensor, fmt: PageFormat) -> Tensor:
        k, v = source_k[:, index].permute(1, 2, 0, 3), source_v[:, index].permute(1, 2, 0, 3)
        return self.pack(k, v, fmt, None if self.decode is None else self.decode.tables.faults)

    def pack(self, k: Tensor, v: Tensor, fmt: PageFormat, faults: Tensor | None) -> Tensor:
        """Pages uint8 [n, page_bytes] of k, v [n, tokens, H, D]; `faults`: see `pack_pages`."""
        vtq = self.geometry.config.vtq
        return pack_pages(k, v, self.stats, fmt, vtq.split, vtq.peak_separation_threshold, faults)

    # -- accounting ------------------------------------------------------------------------------------------------

    def device_bytes(self) -> dict[str, int]:
        """Bytes on the device, by purpose; spare rows of pools included."""
        sizes = {
            "dense": self.dense_k.nbytes + (self.dense_v.nbytes if self.dense_k.numel() else 0),
            "kept": self.kept.nbytes,
            "sketches": self.sketch_codes.nbytes + self.sketch_scales.nbytes,
        }
        if self.geometry.config.selection.rows == "device":
            sizes["rows"] = self.rows.nbytes
        if self.decode is not None:
            sizes["hot"] = self.decode.nbytes
        chosen = sum(ids.nbytes for ids in self.chosen.values()) + (self.shared.nbytes if self.place == 0 else 0)
        if chosen:
            sizes["chosen"] = chosen
        return sizes

    def host_bytes(self) -> int:
        return 0 if self.geometry.config.selection.rows == "device" else self.rows.nbytes
