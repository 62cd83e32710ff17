"""The scan with CUDA C++: see ``sketch.cuh`` for how sketches are scored and ``select.cu`` for the selection.

Four launches: the query's weights; the sketches, read once; the roots of the rows' attention, summed over heads and
counted by bins; the choice. The share of attention that falls on a row is known only when all rows have been seen, so
the scan leaves roots, 2 bytes a row and query head, which mostly stay in the L2 cache.

Shapes that the kernels do not take (see :func:`plan_heads`) go to the Triton twin, or to the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from hisparse.ops._cuda import Kernel, load_kernel
from hisparse.ops._dispatch import has_triton
from hisparse.ops.scan import Chosen
from hisparse.ops.scan.bins import BINS, SHIFT, lowest_bin
from hisparse.vtq.stats import ChannelStats

TYPICAL_HEADS = 32
SHARED = 220 << 10
"""Bytes of shared memory that the tiles on their way may take."""
QTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    warps: warps of a program, one program a multiprocessor; stages: tiles of 8 rows that each warp has on their way;
    overlap: kernels start while the one ahead ends; once: sketches are the first to leave the L2 cache.
    """

    warps: int = 12
    stages: int = 2
    overlap: bool = True
    once: bool = True


@dataclass(frozen=True)
class Plan:
    """How the heads of a shape are shared out: `warp_heads` a warp, `group_heads` an accumulator of eight columns,
    `columns` of them a head, `operands` accumulators a head."""

    words: int
    operands: int
    columns: int
    warp_heads: int
    group_heads: int
    blocks: int

    @property
    def sets(self) -> int:
        """Accumulators of a warp."""
        return self.warp_heads // self.group_heads * self.operands

    def stage_bytes(self, row_size: int) -> int:
        """Shared memory of a tile, as scan.cu computes it."""
        body, token = self.warp_heads * row_size * 16 * self.words, 16 * self.words
        return 8 * (body + (128 + token - body % 128) % 128 + self.warp_heads * row_size)


@cache
def plan_heads(heads: int, head_dim: int, bits: int, queries: int, row_size: int) -> Plan | None:
    """None for shapes that the kernels do not take: they read a head's codes as 4, 8 or 16 words a token, for up to 16
    query heads a KV head, and rows of 4, 8, 12 or 16 tokens."""
    words = head_dim * bits // 128
    if head_dim * bits % 128 or words not in (1, 2, 4) or not 1 <= queries <= 16 or row_size not in (4, 8, 12, 16):
        return None
    operands = -(-queries // 8)
    columns = 8 if queries > 4 else 4 if queries > 2 else 2
    warp_heads = math.gcd(8 // (words * operands), heads)
    group_heads = 1 if operands > 1 else min(warp_heads, 8 // columns)
    return Plan(words, operands, columns, warp_heads, group_heads, heads // warp_heads)


@cache
def multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _fallback() -> ModuleType:
    return import_module(f"hisparse.ops.scan.{'triton' if has_triton('scan') else 'reference'}")


def _sketch_macros(plan: Plan, q: Tensor, stats: ChannelStats, bits: int, row_size: int) -> dict[str, int]:
    return {
        "HEADS": stats.heads, "QUERIES": q.shape[1] // stats.heads, "HEAD_DIM": stats.head_dim, "BITS": bits,
        "ROW": row_size, "HB": plan.warp_heads, "HG": plan.group_heads, "QP": plan.columns, "NB": plan.operands,
    }  # fmt: skip


def _select_kernel(name: str, sets: int, blocks: int, device: torch.device) -> Kernel:
    defines = {"SETS": sets, "BLOCKS": blocks, "BINS": BINS, "SHIFT": SHIFT, "REACH": _reach(sets, blocks)}
    return load_kernel("scan/select.cu", name, defines, device=device).prefer_shared()


def _reach(sets: int, blocks: int) -> int:
    """Rows that four lanes sum: as many as 32 registers of roots hold."""
    return 8 if sets * blocks <= 4 else 4


def _fit(tune: Tuning, stage: int) -> Tuning:
    """Fewer stages, then fewer warps, until the tiles fit into shared memory."""
    warps, stages = tune.warps, tune.stages
    while warps * stages * stage > SHARED:
        if stages > 2:
            stages -= 1
        else:
            warps -= 1
    return replace(tune, warps=warps, stages=stages)


def scan_rows(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    table: Tensor,
    count: Tensor,
    stats: ChannelStats,
    scaling: float,
    bits: int,
    tuning: Tuning | None = None,
) -> Tensor:
    """See :func:`hisparse.ops.scan.scan_rows`."""
    tune = tuning or Tuning()
    plan = _plan(q, codes, scales, table, stats, bits)
    if plan is None:
        worth: Tensor = _fallback().scan_rows(q, codes, scales, table, count, stats, scaling, bits)
        return worth
    return _scan(plan, q, codes, scales, table, count, stats, scaling, bits, tune, None, 0)


def _plan(q: Tensor, codes: Tensor, scales: Tensor, table: Tensor, stats: ChannelStats, bits: int) -> Plan | None:
    if not table.numel() or not len(codes) or q.dtype not in QTYPES:
        return None
    if (codes.data_ptr() | codes.stride(0)) % 16 or (scales.data_ptr() | scales.stride(0)) % 4:
        return None  # rows are copied 16 bytes at a time, scales 4
    return plan_heads(stats.heads, stats.head_dim, bits, q.shape[1] // stats.heads, scales.shape[1] // stats.heads)


def _scan(
    plan: Plan,
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    table: Tensor,
    count: Tensor,
    stats: ChannelStats,
    scaling: float,
    bits: int,
    tune: Tuning,
    histogram: Tensor | None,
    base: int,
) -> Tensor:
    """Worth float32 [B, max_rows]; `histogram` int32 [B, BINS], where given, gets the number of rows of each bin."""
    (batch, width), heads = table.shape, stats.heads
    row_size = scales.shape[1] // heads
    tune = _fit(tune, plan.stage_bytes(row_size))
    if q.stride(2) != 1:
        q = q.contiguous()
    table, count, strides = table.contiguous(), count.contiguous(), [codes.stride(0), scales.stride(0)]
    device, columns = q.device, 8 * plan.operands
    # The programs that weigh keep their multiprocessors for themselves while the scan's first rows are on their way.
    processors = multiprocessors(device.index or 0)
    free = processors - batch * heads if tune.overlap and batch * heads <= processors // 8 else processors
    programs = min(free, batch * plan.blocks * -(-width // 8))
    integers, floats = {"dtype": torch.int32, "device": device}, {"dtype": torch.float32, "device": device}
    weights = torch.empty(batch, heads, plan.operands, 32, 6 * plan.words, **integers)  # type: ignore[call-overload]
    middle, top = torch.empty(2, batch, heads, columns, **floats).unbind()  # type: ignore[call-overload]
    tiles = torch.empty(batch + 1, **integers)  # type: ignore[call-overload]
    roots = torch.empty(plan.blocks, batch, width, 4, plan.sets, **integers)  # type: ignore[call-overload]
    part = torch.empty(programs + batch * plan.blocks, 8 * plan.sets, **floats)  # type: ignore[call-overload]
    worth: Tensor = torch.empty(batch, width, **floats)  # type: ignore[call-overload]
    macros = _sketch_macros(plan, q, stats, bits, row_size)
    kernel = load_kernel(
        "scan/weigh.cu", "weigh_queries", {**macros, "QTYPE": QTYPES[q.dtype]}, device=device
    ).prefer_shared()
    kernel(
        (heads, batch, 1),
        1024,
        [q, stats.query_basis, codes, scales, table, count, weights, middle, top, tiles, histogram,
         0 if histogram is None else histogram.numel(), scaling / math.log(2), q.stride(0), q.stride(1), width,
         *strides],
        overlap=tune.overlap,
    )  # fmt: skip
    macros |= {"WARPS": tune.warps, "STAGES": tune.stages, "ONCE": int(tune.once)}
    kernel = load_kernel("scan/scan.cu", "scan_rows", macros, device=device).prefer_shared()
    kernel(
        (programs, 1, 1),
        32 * tune.warps,
        [weights, middle, top, codes, scales, table, count, roots, part, batch, width, *strides],
        tune.warps * tune.stages * plan.stage_bytes(row_size),
        tune.overlap,
    )
    kernel = _select_kernel("sum_rows", plan.sets, plan.blocks, device)
    kernel(
        (-(-width // (128 * _reach(plan.sets, plan.blocks))), batch, 1),
        512,
        [roots, part, tiles, count, worth, histogram, batch, width, programs, base],
        overlap=tune.overlap,
    )
    return worth


def select_top(
    worth: Tensor,
    table: Tensor,
    count: Tensor,
    budget: int,
    wanted: Tensor | None,
    tuning: Tuning | None = None,
    heads: int = TYPICAL_HEADS,
) -> Chosen:
    """See :func:`hisparse.ops.scan.select_top`; `heads`: the query heads that the worth is a sum over, for speed."""
    (batch, width), tune = worth.shape, tuning or Tuning()
    if not batch or not width:
        empty: Chosen = import_module("hisparse.ops.scan.reference").select_top(worth, table, count, budget, wanted)
        return empty
    worth, table, count = worth.contiguous(), table.contiguous(), count.contiguous()
    base = lowest_bin(heads, budget)
    histogram = torch.zeros(batch, BINS, dtype=torch.int32, device=worth.device)
    kernel = _select_kernel("count_rows", 1, 1, worth.device)
    kernel((-(-width // 2048), batch, 1), 512, [worth, count, histogram, width, base])
    return _choose(worth, table, count, budget, wanted, histogram, base, tune)


def scan_and_select(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    table: Tensor,
    count: Tensor,
    stats: ChannelStats,
    scaling: float,
    bits: int,
    budget: int,
    wanted: Tensor | None,
    tuning: Tuning | None = None,
) -> Chosen:
    """See :func:`hisparse.ops.scan.scan_and_select`."""
    tune = tuning or Tuning()
    plan = _plan(q, codes, scales, table, stats, bits)
    if plan is None:
        worth = scan_rows(q, codes, scales, table, count, stats, scaling, bits, tuning)
        return select_top(worth, table, count, budget, wanted, tuning, q.shape[1])
    base = lowest_bin(q.shape[1], budget)
    table, count = table.contiguous(), count.contiguous()
    histogram = torch.empty(len(table), BINS, dtype=torch.int32, device=q.device)
    worth = _scan(plan, q, codes, scales, table, count, stats, scaling, bits, tune, histogram, base)
    return _choose(worth, table, count, budget, wanted, histogram, base, tune)


def _choose(
    worth: Tensor,
    table: Tensor,
    count: Tensor,
    budget: int,
    wanted: Tensor | None,
    histogram: Tensor,
    base: int,
    tune: Tuning,
) -> Chosen:
    batch, width = worth.shape
    rows = torch.empty(batch, budget, dtype=torch.int32, device=worth.device)
    chosen = torch.empty(batch, dtype=torch.int32, device=worth.device)
    key, place = torch.empty(2, batch, width, dtype=torch.int32, device=worth.device).unbind()
    limits = None if wanted is None else wanted.contiguous()
    kernel = _select_kernel("choose_rows", 1, 1, worth.device)
    kernel(
        (8, batch, 1),
        1024,
        [worth, table, count, limits, histogram, rows, chosen, key, place, width, budget, base],
        overlap=tune.overlap,
    )
    return Chosen(rows, chosen)


__all__ = ["Plan", "Tuning", "plan_heads", "scan_and_select", "scan_rows", "select_top"]
