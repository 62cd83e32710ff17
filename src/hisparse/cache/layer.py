"""One layer's bytes: dense slots, kept pages, rows, sketches; attention over them; packing what leaves the tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.cache.geometry import Geometry
from hisparse.cache.pools import PageIds, Pool
from hisparse.cache.sequence import Commit, View
from hisparse.ops.attend import Packed, attend, attend_recalled
from hisparse.ops.pack import pack_pages
from hisparse.ops.select import select_rows
from hisparse.ops.sketch import build_sketch, score_sketch
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats, estimate_stats

# Queries that are scored and recalled together when a chunk attends token by token: bounds the memory of the gathered
# rows.
QUERY_TILE = 16


@dataclass
class Recalled:
    """What was read back from rows so far."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0

    def count(self, steps: int, rows: int, row_size: int, row_bytes: int) -> None:
        self.steps += steps
        self.rows += rows
        self.tokens += rows * row_size
        self.bytes += rows * row_bytes


class LayerStore:
    """K and V of one layer for every sequence of a batch.

    `stats` may start as None: they are then estimated from the first tokens that are packed.
    """

    def __init__(
        self,
        geometry: Geometry,
        page_ids: PageIds,
        row_ids: PageIds,
        stats: ChannelStats | None,
        order: Tensor,
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        self.page_ids, self.row_ids = page_ids, row_ids
        self.stats = None if stats is None else stats.to(device)
        self.estimated = stats is None
        self.order = order
        self.device = device
        self.page_format, self.row_format = geometry.kept_format, geometry.row_format
        self.dense_k = torch.empty((0, geometry.heads, geometry.slots, geometry.head_dim), device=device)
        self.dense_v = self.dense_k
        on_device = geometry.config.selection.rows == "device"
        self.kept = Pool(self.page_format.page_bytes, device)
        self.rows = Pool(
            self.row_format.page_bytes,
            device if on_device else torch.device("cpu"),
            pin=not on_device and device.type == "cuda",
        )
        tokens = self.row_format.tokens * geometry.heads
        self.sketch_codes = Pool(tokens * geometry.head_dim * geometry.config.selection.sketch_bits // 8, device)
        self.sketch_scales = Pool(tokens, device)
        self.recalled = Recalled()

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
        kept = [Packed(self.kept.read(view.pages, self.device), self.page_format)] if len(view.pages) else []
        rows, row_size = len(view.rows), self.row_format.tokens
        if not rows:
            return attend(q, k, v, dense_k, dense_v, kept, self.stats, scaling)
        chunk = q.shape[1]
        wanted = -(-self.geometry.config.selection.budget(view.length + chunk) // row_size)
        if self._reads_everything(chunk, wanted, rows):
            packed = [*kept, Packed(self.rows.read(view.rows, self.device), self.row_format)]
            self.recalled.count(chunk, rows, row_size, self.row_format.page_bytes)
            return attend(q, k, v, dense_k, dense_v, packed, self.stats, scaling)
        if chunk == 1:
            chosen = view.rows[self._select(q, view.rows, wanted, scaling)]
            packed = [*kept, Packed(self.rows.read(chosen, self.device), self.row_format)]
            self.recalled.count(1, len(chosen), row_size, self.row_format.page_bytes)
            return attend(q, k, v, dense_k, dense_v, packed, self.stats, scaling)
        return self._attend_token_by_token(q, k, v, dense_k, dense_v, kept, view.rows, wanted, scaling)

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
            self.recalled.count(count, chosen.numel(), self.row_format.tokens, self.row_format.page_bytes)
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
        geometry = self.geometry
        codes = self.sketch_codes.read(ids, self.device).view(len(ids), geometry.heads, self.row_format.tokens, -1)
        scales = self.sketch_scales.read(ids, self.device).view(len(ids), geometry.heads, self.row_format.tokens)
        return score_sketch(q, codes, scales, self.stats, scaling)

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
        if len(commit.page_ids):
            self.kept.ensure(self.page_ids.capacity)
            index = torch.from_numpy(commit.page_index).to(self.device)
            pages = self._pack(source_k, source_v, index, self.page_format)
            self.kept.write(torch.from_numpy(commit.page_ids), pages)
        if len(commit.row_ids):
            ids = torch.from_numpy(commit.row_ids)
            index = torch.from_numpy(commit.row_index).to(self.device)
            for pool in (self.rows, self.sketch_codes, self.sketch_scales):
                pool.ensure(self.row_ids.capacity)
            self.rows.write(ids, self._pack(source_k, source_v, index, self.row_format))
            keys = source_k[:, index].permute(1, 2, 0, 3)  # [n, R, H, D]
            codes, scales = build_sketch(keys, self.stats, self.geometry.config.selection.sketch_bits)
            self.sketch_codes.write(ids, codes.flatten(1))
            self.sketch_scales.write(ids, scales.flatten(1))
        remain = torch.from_numpy(commit.remain).to(self.device)
        self.dense_k[row, :, : len(remain)] = source_k[:, remain]
        self.dense_v[row, :, : len(remain)] = source_v[:, remain]

    def _pack(self, source_k: Tensor, source_v: Tensor, index: Tensor, fmt: PageFormat) -> Tensor:
        vtq = self.geometry.config.vtq
        k, v = source_k[:, index].permute(1, 2, 0, 3), source_v[:, index].permute(1, 2, 0, 3)
        return pack_pages(k, v, self.stats, fmt, vtq.split, vtq.peak_separation_threshold)

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
        return sizes

    def host_bytes(self) -> int:
        return 0 if self.geometry.config.selection.rows == "device" else self.rows.nbytes
