"""One layer's KV memory inside vLLM's pool, and attention over it.

All methods take block ids of vLLM's pool and the tables of :class:`~hisparse.integrations.vllm.step.Step`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.cache.layer import CHUNK_BUDGET
from hisparse.config import HiSparseConfig
from hisparse.integrations.vllm.anchors import AnchorShare
from hisparse.integrations.vllm.hot import HotRows, locate_rows, record_rows
from hisparse.integrations.vllm.layout import BlockLayout
from hisparse.integrations.vllm.packing import Packing
from hisparse.integrations.vllm.step import Place, Step
from hisparse.ops._dispatch import backend_for
from hisparse.ops.attend import Packed, attend, attend_recalled, select_for_chunk
from hisparse.ops.decode import Pages, decode_attention, reserve
from hisparse.ops.fetch import HostRows, store_rows
from hisparse.ops.fetch.pinned import pinned_rows
from hisparse.ops.pack import pack_tokens
from hisparse.ops.scan import Chosen, scan_and_select
from hisparse.ops.select import select_rows
from hisparse.ops.sketch import score_sketch, sketch_tokens
from hisparse.ops.unpack import unpack_pages
from hisparse.vtq.stats import ChannelStats, estimate_stats

QUERY_TILE = 16
"""Queries of a short chunk that are scored and recalled together: bounds the memory of the gathered rows."""
CHECK_EVERY = 1024
"""Of so many packed pages one is read back and compared."""


class LayerMemory:
    """Views of one layer's blocks, uint8 [n_blocks, ..., block_bytes], and its rows in the host pool.

    `stats` may be None: they are then estimated from the first block that is packed. budget: most rows that a query
    recalls. batched: requests decode together, without waiting for the device, as on a GPU; on a CPU nothing is gained
    by a batch, and padding is work. hot: the buffer that such steps read rows of the host through. anchors: counts what
    decoding attends to, in one layer of a model. lead: the layer whose choice of rows this one follows in decode steps,
    None where it chooses for itself (`selection.share_layers`).
    """

    def __init__(
        self,
        layout: BlockLayout,
        config: HiSparseConfig,
        blocks: Tensor,
        stats: ChannelStats | None,
        order: Tensor,
        scaling: float,
        budget: int,
        batched: bool = False,
        hot: HotRows | None = None,
        anchors: AnchorShare | None = None,
        lead: LayerMemory | None = None,
    ) -> None:
        self.lead = lead
        self.choice: tuple[Step, Chosen | dict[int, Tensor]] | None = None  # of the last step, for those that follow
        self.batched, self.hot, self.anchors = batched, hot, anchors
        self.layout, self.config, self.scaling, self.budget = layout, config, scaling, budget
        self.blocks_at = blocks.data_ptr()
        self.stats, self.order = None if stats is None else stats.to(blocks.device), order
        flat = blocks.view(torch.uint8).as_strided((len(blocks), layout.block_bytes), (layout.block_bytes, 1))
        self.blocks = flat
        slots = max(layout.ring_tokens, layout.head)
        dense = flat[:, : slots * layout.token_bytes].view(layout.dtype)
        self.dense = dense.view(len(blocks), slots, 2, layout.heads, layout.head_dim)
        self.pages = flat.view(-1, layout.page_stride)[:, : layout.page.page_bytes]
        self.codes = self.scales = self.row_pages = self.pages[:0]
        self.source: HostRows | None = None  # the same rows, where they lie in host memory
        self.records: HostRows | None = None  # the same, known by the numbers of their records
        if layout.has_rows:
            rows = flat.view(-1, layout.row_stride)
            self.codes = rows[:, : layout.code_bytes]
            self.scales = rows[:, layout.code_bytes : layout.code_bytes + layout.scale_bytes]
            if layout.rows_on_device:
                at = layout.row_page_offset
                self.row_pages = rows[:, at : at + layout.row.page_bytes]
            else:
                rows_in_all = len(blocks) * layout.host_rows
                pool, pinned = host_pool(layout.host_lead + rows_in_all, layout.row.page_bytes, blocks.device)
                self.row_pages = pool[layout.host_lead :]
                self.source = HostRows.of([pinned[layout.host_lead :]], blocks.device)
                self.records = record_rows(layout, pinned, len(blocks), blocks.device)
                if hot is not None:
                    hot.ensure(self.records.capacity)
        self.recalled = torch.zeros((), dtype=torch.int64, device=blocks.device)  # rows
        self.steps = torch.zeros((), dtype=torch.int64, device=blocks.device)  # queries that recalled
        self.error = torch.zeros((), device=blocks.device)  # relative, of the keys of the page checked last
        self.faults = torch.zeros(1, dtype=torch.int32, device=blocks.device)  # blocks of values that cannot be packed
        self._packed_pages = 0

    # -- dense tokens ----------------------------------------------------------------------------------------------

    def write(self, place: Place, k: Tensor, v: Tensor) -> None:
        """Put k, v [n, H, D] at `place` [n]."""
        self.dense[place.block, place.slot, 0] = k
        self.dense[place.block, place.slot, 1] = v

    def read(self, place: Place) -> tuple[Tensor, Tensor]:
        """k, v [..., H, D] at `place` [...]."""
        both = self.dense[place.block, place.slot]
        return both[..., 0, :, :], both[..., 1, :, :]

    # -- packing ---------------------------------------------------------------------------------------------------

    def pack(self, k: Tensor, v: Tensor, blocks: Tensor, kept: Tensor, first: bool, q: Tensor | None = None) -> None:
        """Pack full blocks: k, v [m, W, H, D] into `blocks` int64 [m].

        kept: bool [m, W], as many in each block as the layout keeps. first: they begin their sequences. q [n, Hq, D]:
        queries, from which statistics are estimated where there are none yet.
        """
        packing = Packing.of(self.layout, blocks, kept, first)
        self.pack_tokens(k.flatten(0, 1), v.flatten(0, 1), packing, q)

    def pack_tokens(self, k: Tensor, v: Tensor, packing: Packing, q: Tensor | None = None, check: bool = True) -> None:
        """As `pack`, of k, v [m * W, H, D] and what all layers share. What one request overflowed must not stop the
        others: such values are counted. check: compare a page now and then."""
        layout, vtq = self.layout, self.config.vtq
        if self.stats is None:
            self.stats = estimate_stats(k, v, self.order, q)
        if packing.first:
            shape = (len(packing.blocks), layout.tokens)
            for i, x in enumerate((k, v)):
                self.dense[packing.blocks, : layout.head, i] = x.view(*shape, *x.shape[1:])[:, : layout.head]
        rule = (vtq.split, vtq.peak_separation_threshold, self.faults)
        if len(packing.pages):
            pack_tokens(k, v, packing.page_tokens, self.stats, layout.page, *rule, self.pages, packing.pages)
            if check and self.counts(len(packing.pages)):
                self.check(packing, k)
        if not len(packing.rows):
            return
        rows = packing.rows
        sketch_tokens(k, packing.row_tokens, self.stats, layout.sketch_bits, self.codes, self.scales, rows)
        if self.source is None:
            pack_tokens(k, v, packing.row_tokens, self.stats, layout.row, *rule, self.row_pages, packing.lines)
            return
        # Gathered on the device: the bus wants long stretches.
        pages = torch.empty(len(rows), layout.row.page_bytes, dtype=torch.uint8, device=k.device)
        here = torch.arange(len(rows), device=k.device)
        pack_tokens(k, v, packing.row_tokens, self.stats, layout.row, *rule, pages, here)
        store_rows(self.source, packing.lines.int(), pages)
        if self.hot is not None:
            self.hot.forget(rows.int())

    def counts(self, pages: int) -> bool:
        """Count packed pages; True where one of them should be looked at."""
        before, self._packed_pages = self._packed_pages, self._packed_pages + pages
        return before % CHECK_EVERY < pages

    def books(self) -> tuple[Tensor, Tensor, int]:
        """What packing counts and notes, to be taken back by `restore`."""
        return self.faults.clone(), self.error.clone(), self._packed_pages

    def restore(self, books: tuple[Tensor, Tensor, int]) -> None:
        """Undo what was counted since `books`; the tensors stay where they are: a CUDA graph may know them."""
        self.faults.copy_(books[0])
        self.error.copy_(books[1])
        self._packed_pages = books[2]

    def check(self, packing: Packing, k: Tensor) -> None:
        """Note the relative error of the keys of the packing's first page; k [m * W, H, D] as they were.

        Read back as attention reads them, in the model's dtype: by a kernel that is there.
        """
        if not len(packing.pages):
            return
        keys = k[packing.page_tokens[0]].float()
        stored = unpack_pages(self.pages[packing.pages[:1]], self.stats, self.layout.page, self.layout.dtype)[0][0]
        self.error.copy_((stored.float() - keys).norm() / keys.norm().clamp_min(1e-12))

    def row_ids(self, records: Tensor) -> Tensor:
        """Where the packed values of row records lie: the records themselves, or rows of the host pool."""
        return records if self.source is None else self.layout.host_id(records)

    # -- attention -------------------------------------------------------------------------------------------------

    def decode(self, q: Tensor, k: Tensor, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """Attention of one new token a request, which is written first. q [B, Hq, D]; k, v [B, H, D].

        out: [B, Hq, D], contiguous: where a step of all requests together leaves its result, which is also returned.
        """
        if self.batched and backend_for("decode", q.device) != "reference":
            from hisparse.integrations.vllm.step_kernels import renew

            place, new = step.dense, step.new
            dense, length = renew(self.dense, place.block, place.slot, step.dense_past, new.block, new.slot, k, v)
            return self.decode_batch(q, step, dense, length, out)
        self.write(step.new, k, v)
        if self.batched:
            return self.decode_batch(q, step, out=out)
        return torch.stack([self._decode_one(q[i], step, i) for i in range(len(q))])

    def decode_batch(
        self,
        q: Tensor,
        step: Step,
        dense: Tensor | None = None,
        length: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As `decode`, for all requests together and without waiting for the device; the new token is written.

        dense [B, S, 2, H, D], length int32 [B]: the tokens read densely, where they have been gathered.
        """
        layout = self.layout
        if dense is None or length is None:
            dense, length = self.dense[step.dense.block, step.dense.slot], step.dense_past + 1
        dense_k, dense_v = dense[:, :, 0], dense[:, :, 1]
        kept = Pages(self.pages, step.kept_table, step.kept_count, layout.page) if layout.other.pages else None
        recalled = early = None
        if layout.has_rows and step.row_table.shape[1] and self.stats is not None:
            budget = min(self.budget, step.row_table.shape[1])
            followed = self._followed(step)
            if isinstance(followed, Chosen):
                chosen = followed
            else:
                early = reserve(q, dense_k.transpose(1, 2), 0 if self.hot is None else 1)
                chosen = self._choose(q, step.row_table, step.row_count, budget, step.wanted)
                if self.config.selection.share_layers > 1:  # else it would only hold memory
                    self.choice = step, chosen
            recalled = self._bring(chosen, early is not None)
        quantised = self.config.vtq.enable_per_block_quant
        if quantised and self.stats is None:
            kept = None  # nothing has been packed yet
        result = decode_attention(
            q,
            dense_k.transpose(1, 2),
            dense_v.transpose(1, 2),
            length,
            kept,
            recalled,
            self.stats,
            self.scaling,
            split=self.config.vtq.split if quantised else None,
            early=early,
            out=out,
        )
        if self.anchors is not None and recalled is not None:
            # Their part alone, once more: the masses of all pages would be forty thousand numbers a head at a million
            # tokens, of which those of the kept pages are not wanted.
            part = self._attend_recalled_alone(q, dense_k, dense_v, recalled)
            self.anchors.add(result.lse, part, recalled.count)
        return result.out

    def _attend_recalled_alone(self, q: Tensor, dense_k: Tensor, dense_v: Tensor, recalled: Pages) -> Tensor:
        """float32 [B, Hq]: the log-sum-exp over the recalled rows. dense_k, dense_v [B, S, H, D], not read."""
        quantised = self.config.vtq.enable_per_block_quant
        return decode_attention(
            q,
            dense_k.transpose(1, 2),
            dense_v.transpose(1, 2),
            torch.zeros_like(recalled.count),
            None,
            recalled,
            self.stats,
            self.scaling,
            split=self.config.vtq.split if quantised else None,
        ).lse

    def _bring(self, chosen: Chosen, early: bool) -> Pages:
        """Pages of the chosen rows: in the hot buffer, or where they lie. early: see `fetch_rows`."""
        fmt = self.layout.row
        if self.records is not None and self.hot is not None:
            table = self.hot.bring(self.records, chosen.rows, chosen.number, early)
            return Pages(self.hot.all.buffer, table, chosen.number, fmt)
        of_block = None if self.source is None else self.layout
        table = locate_rows(of_block, chosen.rows, chosen.number, self.recalled, self.steps)
        return Pages(self.row_pages, table, chosen.number, fmt)

    def _decode_one(self, q: Tensor, step: Step, row: int) -> Tensor:
        """Request `row` by itself, q [Hq, D]."""
        layout = self.layout
        dense_k, dense_v = (x.transpose(0, 1) for x in self.read(step.dense[row, : int(step.dense_past[row]) + 1]))
        packed = []
        if pages := int(step.kept_count[row]):
            packed.append(Packed(self.pages[step.kept_table[row, :pages].long()], layout.page))
        if rows := int(step.row_count[row]):
            records = step.row_table[row : row + 1, :rows]
            wanted = int(step.wanted[row])
            followed = self._followed(step)
            if isinstance(followed, dict):
                records = followed.get(row, records)
            elif wanted < rows:
                records = self._choose(q[None], records, step.row_count[row : row + 1], wanted, None).rows
                if self.choice is None or self.choice[0] is not step or not isinstance(self.choice[1], dict):
                    self.choice = step, {}
                self.choice[1][row] = records  # type: ignore[index]
            packed.append(self._rows(records[0].long()))
            self.recalled += records.shape[1]
            self.steps += 1
            if self.anchors is not None and self.anchors.due():
                self._measure(self.anchors, q, dense_k, dense_v, packed)
        new = dense_k.shape[1] - 1  # the new token is the last dense one
        return attend(
            q[:, None],
            dense_k[:, new:],
            dense_v[:, new:],
            dense_k[:, :new],
            dense_v[:, :new],
            packed,
            self.stats,
            self.scaling,
        )[:, 0]

    def _measure(self, anchors: AnchorShare, q: Tensor, dense_k: Tensor, dense_v: Tensor, packed: list[Packed]) -> None:
        """Count what `_decode_one` attends to; the last of `packed` are the recalled rows."""

        def pages(part: Packed) -> Pages:
            pool = part.read(q.device)
            table = torch.arange(len(pool), dtype=torch.int32, device=q.device)[None]
            return Pages(pool, table, torch.full((1,), len(pool), dtype=torch.int32, device=q.device), part.fmt)

        length = torch.full((1,), dense_k.shape[1], dtype=torch.int32, device=q.device)
        kept, recalled = (pages(packed[0]) if len(packed) > 1 else None), pages(packed[-1])
        dense = dense_k[None], dense_v[None]
        lse = decode_attention(q[None], *dense, length, kept, recalled, self.stats, self.scaling).lse
        none = torch.zeros_like(length)
        part = decode_attention(q[None], *dense, none, None, recalled, self.stats, self.scaling).lse
        anchors.add(lse, part, recalled.count)

    def _followed(self, step: Step) -> Chosen | dict[int, Tensor] | None:
        """What the layer ahead chose for this step: for all requests, or by request where they decode one by one."""
        choice = None if self.lead is None else self.lead.choice
        return choice[1] if choice is not None and choice[0] is step else None

    def _choose(self, q: Tensor, table: Tensor, count: Tensor, budget: int, wanted: Tensor | None) -> Chosen:
        assert self.stats is not None  # rows exist, so something was packed
        bits = self.layout.sketch_bits
        return scan_and_select(q, self.codes, self.scales, table, count, self.stats, self.scaling, bits, budget, wanted)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, step: Step, row: int, past: int, packed: int) -> Tensor:
        """Attention of a chunk of one request, request `row` of the step, over its past and causally over itself.

        q [T, Hq, D]; k, v [T, H, D]; past, packed: the step's values of the request, on the host. Returns [T, Hq, D].
        """
        layout = self.layout
        number = int(past - packed * layout.tokens + (layout.head if packed else 0))
        dense_k, dense_v = (x.transpose(0, 1) for x in self.read(step.dense[row, :number]))
        pages = layout.first.pages + (packed - 1) * layout.other.pages if packed else 0
        rows = layout.first.rows + (packed - 1) * layout.other.rows if packed else 0
        kept = [Packed(self.pages[step.kept_table[row, :pages].long()], layout.page)] if pages else []
        records = step.row_table[row, :rows].long()
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        chunk = q.shape[1]
        wanted = -(-self.config.selection.budget(past + chunk) // layout.row.tokens)
        if self._reads_everything(chunk, wanted, rows):
            everything = [*kept, self._rows(records)] if rows else kept
            return attend(q, k, v, dense_k, dense_v, everything, self.stats, self.scaling).transpose(0, 1)
        prefill = self.config.prefill
        # Choosing once is cheaper from a few tokens on; a long chunk has no other way.
        if chunk > prefill.recall_max_tokens or (prefill.choose == "chunk" and chunk > CHUNK_BUDGET):
            return self._by_choice(q, k, v, dense_k, dense_v, kept, records, CHUNK_BUDGET * wanted).transpose(0, 1)
        return self._token_by_token(q, k, v, dense_k, dense_v, kept, records, wanted).transpose(0, 1)

    def _reads_everything(self, chunk: int, wanted: int, rows: int) -> bool:
        """True where attending to every row is exact and no dearer than recalling for each query, or is asked for."""
        if wanted >= rows:
            return True
        prefill = self.config.prefill
        return prefill.mode == "full" and (chunk > prefill.recall_max_tokens or chunk * wanted >= rows)

    def _rows(self, records: Tensor) -> Packed:
        """The packed values of row records, where they lie."""
        ids = self.row_ids(records)
        if self.source is None:
            return Packed(self.row_pages[ids], self.layout.row)
        return Packed(self.source, self.layout.row, ids)

    def _sketches(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of row records, as `score_sketch` takes them."""
        shape = (len(records), self.layout.heads, self.layout.row.tokens)
        return self.codes[records].view(*shape, -1), self.scales[records].view(shape)

    def _by_choice(
        self, q: Tensor, k: Tensor, v: Tensor, dense_k: Tensor, dense_v: Tensor, kept: list[Packed], records: Tensor,
        wanted: int,
    ) -> Tensor:  # fmt: skip
        """The whole chunk recalls one set of rows, chosen once; see `prefill`, heads first."""
        assert self.stats is not None  # rows exist, so something was packed
        if wanted < len(records):
            chosen = select_for_chunk(q, *self._sketches(records), self.stats, self.scaling, wanted)
            records = records[chosen.sort().values]  # adjacent rows are read faster
        self.recalled += len(records)
        self.steps += 1
        packed = [*kept, self._rows(records)]
        return attend(q, k, v, dense_k, dense_v, packed, self.stats, self.scaling)

    def _token_by_token(
        self, q: Tensor, k: Tensor, v: Tensor, dense_k: Tensor, dense_v: Tensor, kept: list[Packed], records: Tensor,
        wanted: int,
    ) -> Tensor:  # fmt: skip
        """Each query of the chunk recalls rows of its own; see `prefill`, heads first."""
        layout = self.layout
        assert self.stats is not None  # rows exist, so something was packed
        codes, scales = self._sketches(records)
        pieces = []
        for start in range(0, q.shape[1], QUERY_TILE):
            tile = q[:, start : start + QUERY_TILE]
            end = start + tile.shape[1]
            scores = score_sketch(tile, codes, scales, self.stats, self.scaling)
            chosen = torch.stack(
                [select_rows(scores[:, t : t + 1], layout.row.tokens, wanted) for t in range(tile.shape[1])]
            )
            pages = self._rows(records[chosen].flatten()).read(q.device)
            pages = pages.view(tile.shape[1], -1, layout.row.page_bytes)
            self.recalled += chosen.numel()
            self.steps += tile.shape[1]
            # The tile sees the chunk's earlier tokens as past: they join the dense ones.
            past_k, past_v = torch.cat([dense_k, k[:, :start]], 1), torch.cat([dense_v, v[:, :start]], 1)
            pieces.append(
                attend_recalled(
                    tile,
                    k[:, start:end],
                    v[:, start:end],
                    past_k,
                    past_v,
                    kept,
                    Packed(pages, layout.row),
                    self.stats,
                    self.scaling,
                )
            )
        return torch.cat(pieces, dim=1)


def host_pool(rows: int, row_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """uint8 [rows, row_bytes] in host memory, zero: as kernels on `device` address it, and the tensor that owns it.

    Pinned for a GPU, whose kernels read and write it over the bus; allocated once and never moved.
    """
    if device.type in ("cpu", "meta"):
        pool = torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)
        return pool, pool
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    pinned = pinned_rows(rows, row_bytes)
    return get_accelerator_view_from_cpu_tensor(pinned), pinned
