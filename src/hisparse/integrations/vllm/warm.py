"""Before the first request: kernels are compiled in the background while the weights load, then run once, and graphs of
packing are captured."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.integrations.vllm.hot import Claims, HotRows, HotSize
from hisparse.integrations.vllm.layout import BlockLayout
from hisparse.integrations.vllm.memory import QUERY_TILE, LayerMemory
from hisparse.integrations.vllm.packing import TOGETHER, Full, Packer, Packing
from hisparse.integrations.vllm.step import Place, make_step, row_budget
from hisparse.ops._ahead import Background
from hisparse.ops._dispatch import ON_CUDA, backend_for
from hisparse.vtq.stats import ChannelStats, channel_order

if TYPE_CHECKING:
    from hisparse.integrations.vllm.runtime import Runtime

CHUNK = 1024
"""Tokens of the chunk that is attended to."""
PAST = 64
"""Blocks before it: enough that the recalling modes have to choose."""
META = torch.device("meta")


@dataclass(frozen=True)
class Plan:
    """What follows from a model and its engine's settings, before there is any memory.

    order: int64 [D], see `ChannelStats`; hot: of a layer, without slots for none; requests: most at once; batches:
    numbers of requests that decode in one step; q_heads: of this rank; context: tokens of the longest request.
    """

    layout: BlockLayout
    config: HiSparseConfig
    order: Tensor
    hot: HotSize
    requests: int
    batches: Sequence[int]
    q_heads: int
    context: int


def plan_of(runtime: Runtime) -> Plan:
    """The plan of an engine."""
    vllm = runtime.vllm_config
    requests = int(vllm.scheduler_config.max_num_seqs)
    return Plan(
        runtime.layout,
        runtime.config,
        channel_order(vllm.model_config.hf_text_config, runtime.layout.head_dim).cpu(),
        runtime.hot_size,
        requests,
        [*(getattr(vllm.compilation_config, "cudagraph_capture_sizes", None) or []), 1, requests],
        int(vllm.model_config.get_num_attention_heads(vllm.parallel_config)),
        runtime.context,
    )


def compile_ahead(plan: Plan, index: int | None = None) -> Background | None:
    """Begin to compile what the layers of `plan` run on CUDA device `index` (None: the current one).

    None where the layers run no kernels there.
    """
    index = torch.cuda.current_device() if index is None else index
    if backend_for("decode", torch.device("cuda", index)) == "reference":
        return None
    for op, twins in ON_CUDA.items():  # whose kernels must be there to be seen
        for twin in twins:
            importlib.import_module(f"hisparse.ops.{op}.{twin}")
    for name in ("step_kernels", "kernels"):
        importlib.import_module(f"hisparse.integrations.vllm.{name}")
    return Background(partial(_call_everything, plan), index)


def _call_everything(plan: Plan) -> None:
    """What compiles longest first."""
    layout, config = plan.layout, plan.config
    stats = ChannelStats.identity(layout.heads, layout.head_dim, plan.order).to(META)
    budget, slots = row_budget(layout, config.selection, plan.context), plan.hot.slots
    blocks = torch.empty(2, 1, 1, layout.block_bytes, dtype=torch.uint8, device=META)
    hot = None
    if slots:
        rows = Claims(len(blocks) * layout.rows_per_block, META)
        hot = HotRows(plan.hot, layout, int(config.selection.hot_factor * budget), plan.requests, rows, META)
    scaling = layout.head_dim**-0.5
    memory = LayerMemory(layout, config, blocks, stats, plan.order, scaling, budget, True, hot)
    for batch in sorted({min(batch, plan.requests) for batch in plan.batches}):
        _decode(memory, plan, batch, slots)
    _pack(memory)
    _prefill(memory, plan)


def _decode(memory: LayerMemory, plan: Plan, batch: int, slots: int) -> None:
    """A step of single tokens of `batch` requests."""
    from hisparse.integrations.vllm.step_kernels import fill_step

    layout, selection = memory.layout, memory.config.selection
    width = -(-plan.context // layout.tokens)
    pages = torch.empty(batch, width + 1, dtype=torch.int32, device=META)
    ring = torch.empty(batch, width + layout.ring_blocks, dtype=torch.int32, device=META)
    number = torch.empty(batch, dtype=torch.int64, device=META)
    step = make_step(layout, selection, pages, ring, number, number, width)
    lengths, starts = number.int(), torch.empty(batch + 1, dtype=torch.int32, device=META)
    fill_step(layout, selection, pages, ring, lengths, starts, step, width, slots or None, memory.budget)
    q = torch.empty(batch, plan.q_heads, layout.head_dim, dtype=layout.dtype, device=META)
    k, v = torch.empty(2, batch, layout.heads, layout.head_dim, dtype=layout.dtype, device=META)
    memory.decode(q, k, v, step, torch.empty_like(q))


def _pack(memory: LayerMemory) -> None:
    """One block, as one of a sequence's first and as a later one."""
    layout = memory.layout
    block = torch.zeros(1, dtype=torch.int64, device=META)
    k, v = torch.empty(2, layout.tokens, layout.heads, layout.head_dim, dtype=layout.dtype, device=META)
    kept = torch.empty(1, layout.tokens, dtype=torch.bool, device=META)
    for first in (True, False):
        memory.pack_tokens(k, v, Packing.of(layout, block, kept, first))


def _prefill(memory: LayerMemory, plan: Plan) -> None:
    """What a chunk runs beside the library's attention."""
    from hisparse.ops.attend import chunk_samples, kernels
    from hisparse.ops.fetch import gather_rows
    from hisparse.ops.select import select_rows
    from hisparse.ops.sketch import score_sketch
    from hisparse.ops.unpack import unpack_into

    layout, stats, row = memory.layout, memory.stats, memory.layout.row
    group = plan.q_heads // layout.heads

    def empty(*size: int, dtype: torch.dtype = layout.dtype) -> Tensor:
        made: Tensor = torch.empty(*size, dtype=dtype, device=META)
        return made

    kept, here = layout.page, (layout.heads, group * CHUNK)
    for fmt, dtype in itertools.product({kept, row}, (layout.dtype, torch.float32)):
        k, v = empty(2, layout.heads, fmt.tokens, layout.head_dim, dtype=dtype)
        unpack_into(empty(1, fmt.page_bytes, dtype=torch.uint8), stats, fmt, k, v)
    lse = empty(*here, dtype=torch.float32)
    part, total = empty(*here, layout.head_dim), empty(*here, layout.head_dim, dtype=torch.float32)
    for past, out in itertools.product((part, total), repeat=2):
        kernels.merge((past, lse), (part, lse), torch.empty_like(out))
    if not layout.has_rows or stats is None:
        return
    if memory.source is not None:
        ids, pages = empty(CHUNK, dtype=torch.int64), empty(CHUNK, row.page_bytes, dtype=torch.uint8)
        kernels.gather(memory.source, ids, pages)
        gather_rows(memory.source, ids.int()[None])
    sketched = layout.heads, row.tokens
    for rows in (CHUNK, CHUNK + 1):  # Triton tells multiples of 16 from others
        scales = empty(rows, *sketched, dtype=torch.uint8)
        codes = empty(*scales.shape, layout.code_bytes // scales[0].numel(), dtype=torch.uint8)
        for number in (1, QUERY_TILE):
            scores = score_sketch(empty(plan.q_heads, number, layout.head_dim), codes, scales, stats, memory.scaling)
        select_rows(scores[:, :1], row.tokens, rows // 2)
    keys = kernels.coordinates(codes, scales)
    sample = empty(layout.heads, group * len(chunk_samples(CHUNK)), keys.shape[2], dtype=torch.float16)
    kernels.row_worth(keys, sample, empty(*sample.shape[:2], dtype=torch.float32), row.tokens)


def warm_packing(packer: Packer) -> None:
    """Pack block 0, which is nobody's, and capture it. What layers count stays as it was."""
    before = [memory.books() for memory in packer.layers]
    turn = packer.turn
    device, tokens = packer.layers[0].blocks.device, packer.layers[0].layout.tokens
    for number, first in (*((n, False) for n in TOGETHER), (1, True)):
        nowhere = torch.zeros(number, tokens, dtype=torch.int64, device=device)
        packer.pack(Full(nowhere[:, 0], Place(nowhere, nowhere), first))
    for memory, books in zip(packer.layers, before, strict=True):
        memory.restore(books)
    packer.turn = turn  # the first real page is looked at


def warm_prefill(memory: LayerMemory, q_heads: int) -> None:
    """Attend with a chunk to a past of what block 1 holds, whatever it is: nothing is written.

    q_heads: query heads of this rank.
    """
    layout, device = memory.layout, memory.blocks.device
    if len(memory.blocks) < 2:
        return
    pages = torch.ones(1, PAST + CHUNK // layout.tokens + 1, dtype=torch.int32, device=device)
    ring = torch.ones(1, layout.ring_blocks, dtype=torch.int32, device=device)
    past, new = (torch.tensor([n], device=device) for n in (PAST * layout.tokens, CHUNK))
    step = make_step(layout, memory.config.selection, pages, ring, past, new, PAST)
    q = torch.zeros(CHUNK, q_heads, layout.head_dim, dtype=layout.dtype, device=device)
    k, v = torch.zeros(2, CHUNK, layout.heads, layout.head_dim, dtype=layout.dtype, device=device)
    before = memory.recalled.clone(), memory.steps.clone()
    for length in (CHUNK, CHUNK // 2 + 1):
        memory.prefill(q[:length], k[:length], v[:length], step, 0, PAST * layout.tokens, int(step.packed))
    memory.recalled.copy_(before[0])
    memory.steps.copy_(before[1])
