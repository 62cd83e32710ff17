"""The scan with CUDA C++: see ``sketch.cuh`` for how sketches are scored and ``choice.cuh`` for the selection.

Two launches: the query's weights (``weigh.cu``); and the sketches, read once, with the choice (``step.cu``). The share
of attention that falls on a row is known only when all rows have been seen, so roots of the rows' attention are kept, 2
bytes a row and query head, in the multiprocessors' shared memory as far as they fit (those of about 1M tokens of 32
query heads). For more than 32 sequences, and where there is more than shared memory holds the worth of, there are four
launches, and all roots go through the L2 cache (``scan.cu``, ``select.cu``).

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
ALL_SHARED = 227 << 10
"""Bytes of shared memory that a program can have."""
MOST = 32
"""Sequences of a batch that one kernel can scan and choose from."""
FEW_STAGES = 4
"""Tiles of a warp that are requested at once where it has no more."""
FEW = 1024
"""Candidates of a sequence that are compared with each other, as in choice.cuh."""
LEVELS = 4
"""Times that more of them are narrowed down at most, as in step.cu."""
QTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    warps: warps of a program, one program a multiprocessor; stages: tiles of 8 rows that each warp has on their way
    beside the one in its registers; 0: all that it has of a step where these are few, else one. overlap: kernels start
    while the one ahead ends; once: sketches are the first to leave the L2 cache. whole: scan and choice in one kernel.
    weights: registers of weights that a warp may have, in multiples of six.
    """

    warps: int = 12
    stages: int = 2
    overlap: bool = True
    once: bool = True
    whole: bool = True
    weights: int = 8


def preferred(queries: int) -> Tuning:
    """For `queries` query heads a KV head, what was fastest where it was measured, at 1M tokens (8: 16 warps and one
    stage; 4: 12 warps and two)."""
    return Tuning(warps=16, stages=0, weights=4) if queries > 4 else Tuning()


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

    @property
    def columns_of_all(self) -> int:
        """Columns of all heads, those without a query included."""
        return 8 * self.sets * self.blocks

    def warp_bytes(self, row_size: int, stages: int) -> int:
        """Shared memory of a warp, as tile.cuh computes it."""
        body, token, marks = self.warp_heads * row_size * 16 * self.words, 16 * self.words, self.warp_heads * row_size
        return stages * 8 * (body + (128 + token - body % 128) % 128 + marks)


@cache
def plan_heads(heads: int, head_dim: int, bits: int, queries: int, row_size: int, weights: int = 8) -> Plan | None:
    """None for shapes that the kernels do not take: they read a head's codes as 4, 8 or 16 words a token, for up to 16
    query heads a KV head, and rows of 4, 8, 12 or 16 tokens. weights: see `Tuning`."""
    words = head_dim * bits // 128
    if head_dim * bits % 128 or words not in (1, 2, 4) or not 1 <= queries <= 16 or row_size not in (4, 8, 12, 16):
        return None
    operands = -(-queries // 8)
    columns = 8 if queries > 4 else 4 if queries > 2 else 2
    warp_heads = math.gcd(max(weights // (words * operands), 1), heads)
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


def _fit(tune: Tuning, plan: Plan, row_size: int) -> Tuning:
    """Fewer stages, then fewer warps, until the tiles fit into shared memory."""
    warps, stages = tune.warps, tune.stages
    while warps * plan.warp_bytes(row_size, stages) > SHARED:
        if stages > 2:
            stages -= 1
        else:
            warps -= 1
    return replace(tune, warps=warps, stages=stages)


@dataclass(frozen=True)
class Room:
    """What the kernel that does all needs: warps and tiles of a program, those of the tiles that have their roots in
    shared memory, and bytes of shared memory."""

    warps: int
    tiles: int
    near: int
    shared: int


def plan_step(plan: Plan, tune: Tuning, row_size: int, batch: int, width: int, programs: int) -> Room | None:
    """How `programs` hold the roots of `batch` sequences of up to `width` rows; None where they cannot."""
    warps = tune.warps // plan.blocks * plan.blocks
    quads, tile = plan.columns_of_all // 4, 16 * plan.columns_of_all
    tiles = -(-batch * -(-width // 8) // programs)
    if not tune.whole or batch > MOST or warps < 8 or quads > 32 * warps or tiles >= 4096:
        return None
    parts = max(warps, 32 * warps // quads)
    tail = 4 * ((parts + 1) * plan.columns_of_all + BINS + 2 * FEW + 296) + 64
    behind = max(plan.warp_bytes(row_size, tune.stages) * warps, 32 * tiles + tail)
    fixed = (32 * warps + 96 * plan.blocks) * plan.sets + 64 * MOST + 256
    room = min(tiles, (ALL_SHARED - behind - fixed) // tile)
    return Room(warps, tiles, room, room * tile + behind) if room >= 0 else None


def choose_stages(plan: Plan, tune: Tuning, row_size: int, batch: int, width: int, programs: int) -> Tuning:
    """`tune` with a number of stages: up to ``FEW_STAGES`` where a warp then has nothing left to request when the
    weights arrive and all roots stay in shared memory, else one."""
    if tune.stages:
        return tune
    tiles = -(-batch * -(-width // 8) // programs)
    each = -(-tiles * plan.blocks // tune.warps)
    for stages in range(each, 1, -1) if each <= FEW_STAGES else ():
        room = plan_step(plan, replace(tune, stages=stages), row_size, batch, width, programs)
        if room is not None and room.near == room.tiles:
            return replace(tune, stages=stages)
    return replace(tune, stages=1)


def state_words(plan: Plan, batch: int, programs: int) -> int:
    """Words by which the programs of the kernel that does all tell each other what they found, as step.cu has them."""
    return (programs + batch) * (plan.columns_of_all + 2) + batch * (2 * FEW + BINS + 257 * LEVELS + 1) + 1


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
    tune = tuning or preferred(q.shape[1] // stats.heads)
    plan = _plan(q, codes, scales, table, stats, bits, tune)
    if plan is None:
        worth: Tensor = _fallback().scan_rows(q, codes, scales, table, count, stats, scaling, bits)
        return worth
    scan = _Scan(plan, q, codes, scales, table, count, stats, scaling, bits, tune)
    whole = scan.step_kernel(False)
    return scan.worth() if whole is None else scan.step(whole, None, 0, 0, False)[0]


def _plan(
    q: Tensor, codes: Tensor, scales: Tensor, table: Tensor, stats: ChannelStats, bits: int, tune: Tuning
) -> Plan | None:
    if not table.numel() or not len(codes) or q.dtype not in QTYPES:
        return None
    if (codes.data_ptr() | codes.stride(0)) % 16 or (scales.data_ptr() | scales.stride(0)) % 4:
        return None  # rows are copied 16 bytes at a time, scales 4
    return plan_heads(
        stats.heads, stats.head_dim, bits, q.shape[1] // stats.heads, scales.shape[1] // stats.heads, tune.weights
    )


class _Scan:
    """One call: its launches."""

    def __init__(
        self,
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
    ) -> None:
        self.plan, self.stats, self.scaling = plan, stats, scaling
        self.q = q if q.stride(2) == 1 else q.contiguous()
        self.codes, self.scales, self.table, self.count = codes, scales, table.contiguous(), count.contiguous()
        self.strides = [codes.stride(0), scales.stride(0)]
        self.batch, self.width = table.shape
        row_size = scales.shape[1] // stats.heads
        self.macros = _sketch_macros(plan, q, stats, bits, row_size)
        # The programs that weigh keep their multiprocessors for themselves while the first rows are on their way.
        processors, weighing = multiprocessors(q.device.index or 0), self.batch * stats.heads
        self.free = processors - weighing if tune.overlap and weighing <= processors // 8 else processors
        programs = min(self.free, self.batch * -(-self.width // 8))
        self.tune = choose_stages(plan, tune, row_size, self.batch, self.width, programs)
        self.room = plan_step(plan, self.tune, row_size, self.batch, self.width, programs)
        self.row_size = row_size

    def _empty(self, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        x: Tensor = torch.empty(*size, dtype=dtype, device=self.q.device)
        return x

    def _weigh(self, clear: Tensor | None, limits: Tensor | None = None, budget: int = -1) -> tuple[Tensor, Tensor]:
        """Weights; and the first tile of each sequence. `clear` becomes zero. None of it where a budget is given and
        every sequence wants all its rows."""
        heads, plan = self.stats.heads, self.plan
        weights = self._empty(self.batch, heads, plan.operands, 32, 6 * plan.words)
        tiles = self._empty(self.batch + 1)
        macros = {**self.macros, "QTYPE": QTYPES[self.q.dtype]}
        kernel = load_kernel("scan/weigh.cu", "weigh_queries", macros, device=self.q.device).prefer_shared()
        kernel(
            (heads, self.batch, 1),
            1024,
            [self.q, self.stats.query_basis, self.count, weights, tiles, clear, 0 if clear is None else clear.numel(),
             self.scaling / math.log(2), self.q.stride(0), self.q.stride(1), self.width, limits, budget],
            overlap=self.tune.overlap,
        )  # fmt: skip
        return weights, tiles

    def _tile_macros(self, warps: int, stages: int) -> dict[str, int]:
        return {**self.macros, "WARPS": warps, "STAGES": stages, "ONCE": int(self.tune.once)}

    def worth(self, histogram: Tensor | None = None, base: int = 0) -> Tensor:
        """Worth float32 [B, max_rows]; `histogram` int32 [B, BINS], where given, gets the rows of each bin."""
        plan, batch, width = self.plan, self.batch, self.width
        tune = _fit(self.tune, plan, self.row_size)
        programs = min(self.free, batch * plan.blocks * -(-width // 8))
        weights, tiles = self._weigh(histogram)
        roots = self._empty(plan.blocks, batch, width, 4, plan.sets)
        part = self._empty(programs + batch * plan.blocks, 8 * plan.sets, dtype=torch.float32)
        worth = self._empty(batch, width, dtype=torch.float32)
        macros = self._tile_macros(tune.warps, tune.stages)
        kernel = load_kernel("scan/scan.cu", "scan_rows", macros, device=self.q.device).prefer_shared()
        kernel(
            (programs, 1, 1),
            32 * tune.warps,
            [weights, self.codes, self.scales, self.table, self.count, roots, part, batch, width, *self.strides],
            tune.warps * plan.warp_bytes(self.row_size, tune.stages),
            tune.overlap,
        )
        kernel = _select_kernel("sum_rows", plan.sets, plan.blocks, self.q.device)
        kernel(
            (-(-width // (128 * _reach(plan.sets, plan.blocks))), batch, 1),
            512,
            [roots, part, tiles, self.count, worth, histogram, batch, width, programs, base],
            overlap=tune.overlap,
        )
        return worth

    def step_kernel(self, choose: bool) -> Kernel | None:
        """The kernel that does all; None where its programs cannot all be on the device at the same time."""
        room = self.room
        if room is None:
            return None
        macros = self._tile_macros(room.warps, self.tune.stages) | {"BINS": BINS, "SHIFT": SHIFT, "CHOOSE": int(choose)}
        kernel = load_kernel("scan/step.cu", "scan_and_choose", macros, device=self.q.device).prefer_shared()
        return kernel if kernel.resident(32 * room.warps, room.shared) else None

    def step(
        self, kernel: Kernel, limits: Tensor | None, budget: int, base: int, choose: bool
    ) -> tuple[Tensor, Tensor]:
        """Scan and choice in one kernel: rows and their number, or (not `choose`) worth, twice."""
        plan, room, batch, width = self.plan, self.room, self.batch, self.width
        assert room is not None
        programs = min(self.free, batch * -(-width // 8))
        state = self._empty(state_words(plan, batch, programs))
        weights, _ = self._weigh(state, limits, budget if choose else -1)
        far = self._empty(programs * (room.tiles - room.near), 4 * plan.columns_of_all)
        worth = rows = chosen = None
        if choose:
            rows, chosen = self._empty(batch, budget), self._empty(batch)
        else:
            worth = self._empty(batch, width, dtype=torch.float32)
        kernel(
            (programs, 1, 1),
            32 * room.warps,
            [weights, self.codes, self.scales, self.table, self.count, state, far, worth, limits, rows, chosen, batch,
             width, *self.strides, room.tiles, room.near, budget, base],
            room.shared,
            self.tune.overlap,
            together=True,
        )  # fmt: skip
        if worth is not None:
            return worth, worth
        assert rows is not None
        assert chosen is not None
        return rows, chosen


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
    tune = tuning or preferred(q.shape[1] // stats.heads)
    plan = _plan(q, codes, scales, table, stats, bits, tune)
    if plan is None:
        worth = scan_rows(q, codes, scales, table, count, stats, scaling, bits, tuning)
        return select_top(worth, table, count, budget, wanted, tuning, q.shape[1])
    scan = _Scan(plan, q, codes, scales, table, count, stats, scaling, bits, tune)
    base = lowest_bin(q.shape[1], budget)
    whole = scan.step_kernel(True)
    if whole is not None:
        return Chosen(*scan.step(whole, None if wanted is None else wanted.contiguous(), budget, base, True))
    histogram = torch.empty(len(table), BINS, dtype=torch.int32, device=q.device)
    worth = scan.worth(histogram, base)
    return _choose(worth, scan.table, scan.count, budget, wanted, histogram, base, tune)


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


__all__ = ["Plan", "Tuning", "plan_heads", "preferred", "scan_and_select", "scan_rows", "select_top"]
