"""What the layers of one engine share: layout, companions, the step in progress, blocks waiting to be packed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import ConfigError, UnsupportedError
from hisparse.integrations.vllm.anchors import AnchorShare
from hisparse.integrations.vllm.companions import choose_kept, companions, of_rank
from hisparse.integrations.vllm.compat import flash_attention_3
from hisparse.integrations.vllm.hot import Claims, HotRows, HotSize, hot_size, why_no_buffer
from hisparse.integrations.vllm.layout import BlockLayout, choose_layout
from hisparse.integrations.vllm.memory import LayerMemory
from hisparse.integrations.vllm.options import Options, refuse
from hisparse.integrations.vllm.packing import Full, Packer, Packing, Places
from hisparse.integrations.vllm.ranks import all_heads, rank
from hisparse.integrations.vllm.sizes import free_memory, kv_memory
from hisparse.integrations.vllm.step import Step, make_step, ring_place, row_budget
from hisparse.integrations.vllm.warm import compile_ahead, plan_of, warm_packing, warm_prefill
from hisparse.ops._dispatch import backend_for
from hisparse.ops.attend import flash3
from hisparse.tlif import Scorer
from hisparse.vtq.stats import ChannelStats, channel_order

logger = logging.getLogger("vllm.hisparse")

STATIC = ("cuda",)
"""Kinds of devices on which steps of single tokens have the same shapes and addresses each time, as CUDA graphs want
them, and read rows of the host through hot buffers."""


@dataclass(frozen=True)
class Chunk:
    """A request that has more than one new token: its row in the step, its tokens in the batch, host values."""

    row: int
    start: int
    end: int
    past: int
    packed: int

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass
class Metadata:
    """A step as the layers see it. step: tables of all requests; single: of those with one new token, at `singles`."""

    step: Step | None = None
    pages: Tensor | None = None
    ring: Tensor | None = None
    single: Step | None = None
    singles: Tensor | None = None  # int64 [n], tokens of the batch; None where all are
    tokens: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    places: dict[int, Places] = field(default_factory=dict)  # of a row's chunk
    packings: dict[int, list[Packing]] = field(default_factory=dict)  # of the blocks that a row's chunk completes


class Runtime:
    """Shared state of one engine's layers on one rank. heads: KV heads on this rank."""

    def __init__(self, vllm_config: Any, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.options = Options.read(vllm_config.additional_config)
        self.config = self.options.config
        refuse(vllm_config, self.config)
        self.vllm_config = vllm_config
        self.context = int(vllm_config.model_config.max_model_len)
        self.static = vllm_config.device_config.device_type in STATIC
        self.all_layers = int(vllm_config.model_config.get_num_layers(vllm_config.parallel_config))
        kinds = list(getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or [])
        self.number_of_layers = kinds.count("full_attention") or self.all_layers
        self.model_layers: list[int] = []  # which of the model's layers those are that HiSparse holds
        self.kv_memory = kv_memory(vllm_config) if self.static else 0
        self.layout, self.hot_size = self._sizes(heads, head_dim, dtype)
        self.budget = row_budget(self.layout, self.config.selection, self.context)  # rows that a query recalls at most
        self.width = -(-self.context // self.layout.tokens)
        self.layers: list[LayerMemory | None] = []
        self.hot: list[HotRows | None] = []
        self.claims = Claims(self.hot_size.rows, torch.device(vllm_config.device_config.device_type))
        self.full: list[Full] = []
        self.anchors: AnchorShare | None = None  # of the layer in the middle
        self._faults_seen = 0
        self._anchors_seen: tuple[float, ...] = (0.0, 0.0)
        self._waiting: Metadata | None = None
        self._room: Step | None = None
        self._packer: Packer | None = None
        self.packed_tokens = 0
        self._offered: dict[str, Any] = {}
        self._companions: tuple[Scorer, list[ChannelStats] | None] | None = None
        flash3.use(flash_attention_3() if self.static else None)
        self._compiling = compile_ahead(plan_of(self)) if self.static and torch.cuda.is_available() else None
        self._announce()

    def _sizes(self, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[BlockLayout, HotSize]:
        """Layout of blocks, and size of a layer's hot buffer, which takes its bytes from theirs."""
        selection, tokens = self.config.selection, self.options.block_tokens
        layout = choose_layout(self.config, heads, head_dim, dtype, self.context, tokens)
        if not self.static or not layout.host_rows or not selection.hot_factor:
            return layout, HotSize(0, 0, 0, 0)
        memory = self.kv_memory // self.all_layers
        budget = row_budget(layout, selection, self.context)
        requests = int(self.vllm_config.scheduler_config.max_num_seqs)
        size = hot_size(selection, layout, budget, requests, memory)
        layout = choose_layout(self.config, heads, head_dim, dtype, self.context, tokens, size.bytes / memory)
        return layout, hot_size(selection, layout, budget, requests, memory)

    @property
    def capacity(self) -> float:
        """Bytes of a dense bfloat16 cache over those here, at the longest request, hot buffers included."""
        share = self.hot_size.bytes * self.number_of_layers / self.kv_memory if self.hot_size.slots else 0.0
        return self.layout.capacity(self.context) * (1 - share)

    def _announce(self) -> None:
        reached, target, size = self.capacity, self.config.budget.capacity, self.hot_size
        logger.info(
            "HiSparse: a block of %d bytes stands for %d tokens, %.2f x bfloat16 at %d tokens",
            self.layout.block_bytes,
            self.layout.tokens,
            reached,
            self.context,
        )
        if self.layout.has_rows and self.layout.sketch_bits != self.config.selection.sketch_bits:
            logger.info(
                "HiSparse: sketches of 1 bit: with 2 budget.capacity = %g is out of reach at --max-model-len %d; say "
                "selection.sketch_bits = 2 to have 2 all the same",
                target,
                self.context,
            )
        if self.config.evict != "none" and target is not None and reached < target:
            logger.warning(
                "HiSparse: budget.capacity = %g is out of reach at --max-model-len %d (%.2f): the dense tail weighs "
                "too much. A longer context or a shorter tlif.prefix_length reaches more",
                target,
                self.context,
                reached,
            )
        if size.slots:
            logger.info(
                "HiSparse: hot buffers of %d rows a layer, %.1f MiB in all: a step recalls no more than that, which "
                "%d requests of the greatest length reach",
                size.slots,
                size.bytes * self.number_of_layers / 2**20,
                size.requests,
            )
        elif self.static and self.layout.host_rows and self.config.selection.hot_factor:
            logger.warning(
                "HiSparse: no hot buffer, every step reads its rows from host memory: %s takes more than 1/%d of the "
                "KV memory. %s",
                *why_no_buffer(self.layout, self.context),
            )

    def add_layer(self, model_layer: int) -> int:
        """A place for one more layer, whose hot buffer is made now: vLLM counts it among the model's own bytes.

        model_layer: how many layers of the model, whatever their attention, come before it. Where the user says how
        many bytes the KV memory has, the blocks get what the buffer leaves. Returns its index.
        """
        hot = None
        if self.hot_size.slots:
            device, factor = self.claims.entries.device, self.config.selection.hot_factor
            requests = int(self.vllm_config.scheduler_config.max_num_seqs)
            hot = HotRows(self.hot_size, self.layout, int(factor * self.budget), requests, self.claims, device)
            cache = self.vllm_config.cache_config
            if cache.kv_cache_memory_bytes:
                cache.kv_cache_memory_bytes -= self.hot_size.bytes
        self.layers.append(None)
        self.hot.append(hot)
        self.model_layers.append(model_layer)
        return len(self.layers) - 1

    def check_dimensions(self, heads: int, head_dim: int) -> None:
        if (heads, head_dim) != (self.layout.heads, self.layout.head_dim):
            raise ConfigError(
                f"layers of {self.layout.heads} x {self.layout.head_dim} and of {heads} x {head_dim} KV heads in one "
                "model: HiSparse holds models whose layers are alike; use a stock --attention-backend"
            )

    def check_group(self, layers: int, tokens: int, block_bytes: int) -> None:
        """Raise UnsupportedError where vLLM has arranged a group's memory otherwise than HiSparse asked for.

        It does so beside layers of another kind. layers: of the group; tokens, block_bytes: of its blocks.
        """
        if layers != len(self.layers):
            raise UnsupportedError(
                f"vLLM gives {layers} of {len(self.layers)} full-attention layers a block table of their own, for "
                "layers of another kind are fewer; HiSparse needs one for all: use a stock --attention-backend"
            )
        if (tokens, block_bytes) != (self.layout.tokens, self.layout.block_bytes):
            raise UnsupportedError(
                f"a block of the other layers is larger than the {self.layout.block_bytes} bytes of one of HiSparse's "
                f"({block_bytes}); say a smaller --block-size, or hisparse_block_tokens above {self.layout.tokens}"
            )

    def check_host(self, blocks: int, free: int | None = None) -> None:
        """Raise ConfigError where the rows of so many blocks do not fit the host's free memory in bytes (`free`)."""
        if not self.layout.host_block_bytes:
            return
        one = self.layout.host_block_bytes * len(self.layers)
        _, ranks = rank()
        free = free_memory() if free is None else free
        if free is not None and blocks * one * ranks > free:
            fit = int(0.9 * free / (one * ranks))
            raise ConfigError(
                f"{blocks} blocks set aside {blocks * one * ranks / 2**30:.1f} GiB in host memory, of which "
                f"{free / 2**30:.1f} GiB are free; say --num-gpu-blocks-override {fit}, lower --kv-cache-memory-bytes, "
                'or keep rows on the device (selection.rows = "device")'
            )

    # -- one step --------------------------------------------------------------------------------------------------

    def offer(self, kind: str, common: Any) -> Metadata:
        """Take vLLM's metadata of one of the two groups, "pages" or "ring"; the second one completes the step."""
        if self._waiting is None or kind in self._offered:
            self._waiting, self._offered = Metadata(), {}
        metadata = self._waiting
        self._offered[kind] = common
        if len(self._offered) == 2:
            self._begin(metadata, self._offered["pages"], self._offered["ring"].block_table_tensor)
            self._waiting, self._offered = None, {}
        return metadata

    def _begin(self, metadata: Metadata, common: Any, ring: Tensor) -> None:
        self.pack_full()
        requests = int(common.num_reqs)
        begins = common.query_start_loc_cpu[: requests + 1].tolist()
        begins += begins[-1:] * (requests + 1 - len(begins))  # requests that fill up a batch have no tokens
        lengths = common.seq_lens_cpu_upper_bound
        ends = (common.seq_lens.cpu() if lengths is None else lengths)[:requests].tolist()
        ends += [0] * (requests - len(ends))
        pages, ring = common.block_table_tensor[:requests], ring[:requests]
        metadata.pages, metadata.ring, metadata.tokens = pages, ring, begins[-1]
        if int(common.max_query_len) == 1 and self.static:
            metadata.step = metadata.single = self._fixed(common, pages, ring)
            self._note_full(metadata, [row for row in range(requests) if begins[row + 1] > begins[row]], ends)
            return
        width = self.width if self.static else min(self.width, max(1, -(-max(ends) // self.layout.tokens)))
        metadata.step = step = self._step(common, pages, ring, width)
        packed = step.packed.tolist()
        rows = []
        for row in range(requests):
            start, end = begins[row], begins[row + 1]
            if end - start == 1:
                rows.append(row)
            elif end > start:
                metadata.chunks.append(Chunk(row, start, end, ends[row] - (end - start), packed[row]))
        if rows:
            index = torch.tensor(rows, device=pages.device)
            metadata.single = self._limited(step.select(index)).narrowed()
            metadata.singles = torch.tensor([begins[row] for row in rows], device=pages.device)
            self._note_full(metadata, rows, ends)

    def _limited(self, step: Step) -> Step:
        """The step with no more rows wanted than a hot buffer holds, and with all of few rows."""
        return step.limited(self.hot_size.slots, self.budget) if self.hot_size.slots else step

    def _step(self, common: Any, pages: Tensor, ring: Tensor, width: int) -> Step:
        """Tables of the requests that vLLM's metadata tells of."""
        starts = common.query_start_loc[: len(pages) + 1]
        new = starts[1:] - starts[:-1]
        past = (common.seq_lens[: len(pages)] - new).long()
        return make_step(self.layout, self.config.selection, pages, ring, past, new.long(), width)

    def _fixed(self, common: Any, pages: Tensor, ring: Tensor) -> Step:
        """A step of single tokens, with the tables where CUDA graphs expect them."""
        requests = len(pages)
        if self._room is None:
            step = self._step(common, pages[:1], ring[:1], self.width)
            self._room = step.room(int(self.vllm_config.scheduler_config.max_num_seqs))
        if backend_for("decode", pages.device) == "reference":
            return self._limited(self._step(common, pages, ring, self.width)).copied(self._room)
        from hisparse.integrations.vllm.step_kernels import fill_step

        found, most = self._room.select(slice(0, requests)), self.hot_size.slots or None
        lengths, starts = common.seq_lens[:requests], common.query_start_loc[: requests + 1]
        fill_step(
            self.layout, self.config.selection, pages, ring, lengths, starts, found, self.width, most, self.budget
        )
        return found

    def _note_full(self, metadata: Metadata, rows: list[int], ends: list[int]) -> None:
        """Remember the blocks that requests with one new token fill in this step."""
        assert metadata.pages is not None
        assert metadata.ring is not None
        assert metadata.step is not None
        tokens, device = self.layout.tokens, metadata.pages.device
        for first in (True, False):
            full = [row for row in rows if ends[row] and ends[row] % tokens == 0 and (ends[row] == tokens) is first]
            if not full:
                continue
            row = torch.tensor(full, device=device)
            block = torch.tensor([ends[i] // tokens - 1 for i in full], device=device)
            position = block[:, None] * tokens + torch.arange(tokens, device=device)
            place = ring_place(self.layout, metadata.ring[row], metadata.step.lead[row], position)
            self.full.append(Full(metadata.pages[row, block].long(), place, first))

    # -- packing ---------------------------------------------------------------------------------------------------

    @property
    def companions(self) -> tuple[Scorer, list[ChannelStats] | None]:
        if self._companions is None:
            self._companions = companions(self.vllm_config, self.options, self.model_layers[0] == 0)
        return self._companions

    def memory(self, index: int, blocks: Tensor, scaling: float) -> LayerMemory:
        """The memory of layer `index`, made when its blocks are first seen."""
        memory = self.layers[index]
        if memory is None or memory.blocks_at != blocks.data_ptr():
            if self._compiling is not None:
                self._compiling.join()
            stats = self.companions[1]
            own = None
            if stats is not None:
                own_rank, ranks = rank()
                total = int(self.vllm_config.model_config.get_total_num_kv_heads())
                own = of_rank(stats[self.model_layers[index]], own_rank, self.layout.heads, total, ranks)
            elif blocks.is_cuda:
                own = self._without_calibration()
            order = channel_order(self.vllm_config.model_config.hf_text_config, self.layout.head_dim)
            hot = self.hot[index]
            if index == self.number_of_layers // 2:
                self.anchors = AnchorShare(blocks.device)
            anchors = self.anchors if index == self.number_of_layers // 2 else None
            behind = index % self.config.selection.share_layers
            lead = self.layers[index - behind] if behind else None
            memory = LayerMemory(
                self.layout, self.config, blocks, own, order, scaling, self.budget, self.static, hot, anchors, lead
            )
            self.layers[index] = memory
            if index == len(self.layers) - 1:
                self._warm_up()
        return memory

    def _without_calibration(self) -> ChannelStats:
        """Statistics where there is no calibration: a CUDA graph cannot wait until they are estimated."""
        order = channel_order(self.vllm_config.model_config.hf_text_config, self.layout.head_dim)
        if self.vllm_config.load_config.load_format != "dummy" and self.config.vtq.enable_per_block_quant:
            raise ConfigError(
                "no calibration for this model, which a GPU needs before the first token: make one with `hisparse "
                "calibrate` and give --additional-config '{\"hisparse_calibration\": FILE, ...}'"
            )
        return ChannelStats.identity(self.layout.heads, self.layout.head_dim, order)

    def decide(self, values: Tensor, first: bool) -> Tensor:
        """Which tokens of full blocks are kept, bool [m, W], from layer 0's values [m, W, H, D] on this rank."""
        counts = self.layout.first if first else self.layout.other
        rows = all_heads(values, int(self.vllm_config.model_config.get_total_num_kv_heads())).flatten(2)
        head = self.layout.head if first else 0
        if self.config.evict == "none":
            return torch.arange(rows.shape[1], device=rows.device).ge(head).expand(len(rows), -1)
        return choose_kept(self.companions[0], rows, counts.pages * self.layout.page.tokens, head)

    def statistics(self) -> dict[str, float]:
        """Counters and gauges of :mod:`hisparse.integrations.vllm.metrics`; waits for the device."""
        layers = [memory for memory in self.layers if memory is not None]
        found: dict[str, float] = {
            "packed_tokens": self.packed_tokens,
            "capacity_ratio": self.capacity,
        }
        if layers:
            rows, steps = (
                torch.stack([torch.stack([memory.recalled, memory.steps]) for memory in layers]).sum(0).tolist()
            )
            buffers = [hot.counts() for hot in self.hot if hot is not None]
            hits, misses, shared, queries = torch.stack(buffers).sum(0).tolist() if buffers else (0, 0, 0, 0)
            rows += hits + misses + shared
            found["recall_steps"] = steps + queries
            found["recalled_rows"], found["recalled_bytes"] = rows, rows * self.layout.row.page_bytes
            found["hot_hits"], found["hot_misses"] = hits + shared, misses
            found["hot_bytes"] = self.hot_size.bytes * len(layers)
            found.update(self._anchor_hit_rate())
            found["faulty_blocks"] = self._faults(layers)
            # Those of layers that have looked at none of their pages yet are 0, those of faulty blocks not a number.
            errors = torch.stack([memory.error for memory in layers])
            if len(errors := errors[errors > 0]):
                found["quantisation_error"] = float(errors.mean())
            found["device_bytes"] = sum(len(memory.dense) for memory in layers) * self.layout.block_bytes
            found["host_bytes"] = sum(0 if self.layout.rows_on_device else memory.row_pages.nbytes for memory in layers)
        return found

    def _faults(self, layers: list[LayerMemory]) -> int:
        """Blocks so far that held what cannot be packed; says so when there are more."""
        faults = int(torch.cat([memory.faults for memory in layers]).sum())
        if faults > self._faults_seen:
            logger.warning(
                "HiSparse: %d blocks of keys or values held inf or NaN: the requests that they are of read nonsense. "
                "A float16 model may have overflowed: try bfloat16",
                faults - self._faults_seen,
            )
        self._faults_seen = faults
        return faults

    def _anchor_hit_rate(self) -> dict[str, float]:
        """Of the queries since the last call; nothing where there were none."""
        if self.anchors is None:
            return {}
        now = tuple(self.anchors.sums.tolist())
        mass, queries = (x - y for x, y in zip(now, self._anchors_seen, strict=True))
        self._anchors_seen = now
        return {"anchor_hit_rate": mass / queries} if queries > 0 else {}

    def pack_full(self) -> None:
        """Pack what the last step's single tokens filled."""
        full, self.full = self.full, []
        packer = self._all_layers() if full else None
        if packer is None:
            return  # or a step without a forward pass: nothing was written
        for item in full:
            packer.pack(item)
            self.packed_tokens += len(item) * self.layout.tokens

    def _all_layers(self) -> Packer | None:
        """What packs in all layers, once all of them have their memory."""
        layers = [memory for memory in self.layers if memory is not None]
        if len(layers) < len(self.layers):
            return None
        if self._packer is None or any(x is not y for x, y in zip(self._packer.layers, layers, strict=True)):
            self._packer = Packer(layers, self.decide, self._captures())
        return self._packer

    def _warm_up(self) -> None:
        """While vLLM tries a first step, before the server says that it is ready."""
        packer = self._all_layers()
        if packer is None or not packer.graphs or torch.cuda.is_current_stream_capturing():
            return
        heads = self.vllm_config.model_config.get_num_attention_heads(self.vllm_config.parallel_config)
        warm_packing(packer)
        warm_prefill(packer.layers[0], int(heads))

    def _captures(self) -> bool:
        """True where packing waits for nothing, so that a CUDA graph can hold it."""
        vtq = self.config.vtq
        kernels = all(fmt.groups in (1, 2, 4) for fmt in (self.layout.page, self.layout.row))
        return (
            self.static
            and vtq.enable_per_block_quant
            and vtq.split != "peaks"
            and kernels
            and rank()[1] == 1  # the ranks gather values from each other in between
            and backend_for("pack", self.claims.entries.device) != "reference"
        )

    def commit(
        self, index: int, memory: LayerMemory, metadata: Metadata, chunk: Chunk, qkv: tuple[Tensor, ...]
    ) -> None:
        """Take a chunk in after its attention: pack the blocks it completes, write the rest to the ring.

        qkv: q [T, Hq, D], k, v [T, H, D].
        """
        assert metadata.pages is not None
        assert metadata.ring is not None
        assert metadata.step is not None
        q, k, v = qkv
        places = metadata.places.get(chunk.row)
        if places is None:
            part, after = slice(chunk.row, chunk.row + 1), chunk.past + chunk.length
            places = Places.of(self.layout, metadata.ring[part], metadata.step.lead[part], chunk.past, after)
            metadata.places[chunk.row] = places
        begin, end = chunk.past // self.layout.tokens, (chunk.past + chunk.length) // self.layout.tokens
        if end > begin:
            full_k, full_v = k, v
            if places.old is not None:
                past_k, past_v = memory.read(places.old)
                full_k, full_v = torch.cat([past_k, k]), torch.cat([past_v, v])
            if index == 0:
                self.packed_tokens += (end - begin) * self.layout.tokens
                metadata.packings[chunk.row] = self._packings(metadata, chunk, full_v)
            start = 0
            for packing in metadata.packings[chunk.row]:
                stop = start + len(packing.blocks) * self.layout.tokens
                memory.pack_tokens(full_k[start:stop], full_v[start:stop], packing, q)
                start = stop
        number = len(places.new.block)
        memory.write(places.new, k[-number:], v[-number:])

    def _packings(self, metadata: Metadata, chunk: Chunk, values: Tensor) -> list[Packing]:
        """How the blocks that a chunk completes are packed; values [N, H, D] of layer 0 from the first of them on."""
        assert metadata.pages is not None
        tokens = self.layout.tokens
        begin, end = chunk.past // tokens, (chunk.past + chunk.length) // tokens
        blocks = metadata.pages[chunk.row, begin:end].long()
        whole = values[: (end - begin) * tokens].view(end - begin, tokens, *values.shape[1:])
        firsts = 1 if begin == 0 else 0
        parts = ((slice(0, firsts), True), (slice(firsts, None), False))
        return [
            Packing.of(self.layout, blocks[some], self.decide(whole[some], first), first)
            for some, first in parts
            if len(blocks[some])
        ]
