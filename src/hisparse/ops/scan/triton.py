"""The scan with Triton: see :mod:`.kernels` for how sketches are scored and :mod:`.choose` for the selection.

Four launches score: the queries' weights; the sketches, read once; the shares' sums combined; the heads summed. The
share of attention that falls on a row is known only when all rows have been seen, so the root of each row's attention
is kept for the fourth, as bfloat16 relative to a score of zero: 2 bytes a row and query head, 1/8 to 1/16 of the
sketches' own bytes, which mostly stay in the L2 cache. Reading the sketches twice would cost all of them again;
writing scores of tokens, R times more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from hisparse.ops.scan import Chosen
from hisparse.ops.scan.bins import BINS, SHIFT, lowest_bin
from hisparse.ops.scan.choose import count_first, take_first, take_rest
from hisparse.ops.scan.kernels import INTERPRET, combine_shares, scan_share, sum_heads, weigh_queries
from hisparse.vtq.stats import ChannelStats

TYPICAL_HEADS = 32
WEIGHTS = 256
"""Weights of one field that a program of one warp has registers for."""


@dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    rows: rows a tile; warps: warps a program; stages: tiles in flight through shared memory (1: registers only);
    tokens: tokens of a row requested at once; groups: head groups a program; shared: heads a group (see
    `plan_heads`); programs: programs a multiprocessor.
    """

    rows: int = 16
    warps: int = 1
    stages: int = 1
    tokens: int = 4
    groups: int = 2
    programs: int = 20
    registers: int | None = 96
    weights: int = WEIGHTS
    shared: int = 0
    sum_tiles: int = 8
    sum_rows: int = 256
    take_rows: int = 1024


def default_tuning(row_size: int) -> Tuning:
    """Short rows: the next tile on its way through shared memory pays; long ones have loads enough in flight
    without."""
    return Tuning(stages=3 if row_size < 8 else 1)


@dataclass(frozen=True)
class Plan:
    """Head groups of a shape: a head has `words` 16-bit words; `shared` heads an operand of `columns` words by
    `queries` columns, `groups` operands."""

    words: int
    shared: int
    groups: int
    columns: int
    queries: int


@cache
def plan_heads(heads: int, head_dim: int, bits: int, queries: int, shared: int = 0) -> Plan:
    """`shared` 0: enough heads an operand for its 16 columns, and for eight queries where that takes four heads or
    less."""
    words = head_dim * bits // 16
    shared = max(1, min(heads, shared or max(16 // words, min(8 // queries, 4))))
    columns = max(16, triton.next_power_of_2(shared * words))
    return Plan(words, shared, -(-heads // shared), columns, max(8, triton.next_power_of_2(shared * queries)))


def weights(
    q: Tensor, stats: ChannelStats, scaling: float, plan: Plan, strides: tuple[int, int, int], batch: int, queries: int
) -> tuple[Tensor, Tensor]:
    """Weights float16 [batch, groups, 6, columns, queries] and middles float32 [batch, groups, 6, queries] of `q`,
    whose query i of KV head h of sequence b begins at b * strides[0] + h * strides[1] + i * strides[2]."""
    basis = stats.query_basis
    weight = torch.empty(batch, plan.groups, 6, plan.columns, plan.queries, dtype=torch.float16, device=q.device)
    middle = torch.empty(batch, plan.groups, 6, plan.queries, dtype=torch.float32, device=q.device)
    dim = stats.head_dim
    weigh_queries[(plan.groups, batch, 6)](
        q, basis, weight, middle, float(scaling), *strides, stats.heads, dim, dim, plan.words, plan.shared, queries,
        plan.columns, plan.queries, min(128, triton.next_power_of_2(dim)),
    )  # fmt: skip
    return weight, middle


@cache
def multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


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
    return _scan(q, codes, scales, table, count, stats, scaling, bits, tuning, None, 0)


def _scan(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    table: Tensor,
    count: Tensor,
    stats: ChannelStats,
    scaling: float,
    bits: int,
    tuning: Tuning | None,
    histogram: Tensor | None,
    base: int,
) -> Tensor:
    batch, q_heads, dim = q.shape
    heads, width = stats.heads, table.shape[1]
    worth = torch.empty(batch, width, dtype=torch.float32, device=q.device)
    if not width or not batch:
        return worth
    if not len(codes):
        return worth.fill_(float("-inf"))
    row_size, queries = scales.shape[1] // heads, q_heads // heads
    tune = tuning or default_tuning(row_size)
    if q.stride(2) != 1:
        q = q.contiguous()
    table, count = table.contiguous(), count.contiguous()
    plan = plan_heads(heads, dim, bits, queries, tune.shared)
    used = plan.shared * queries
    strides = (q.stride(0), queries * q.stride(1), q.stride(1))
    weight, middle = weights(q, stats, scaling, plan, strides, batch, queries)
    room = max(1, tune.weights // (plan.columns * plan.queries))
    groups = max(g for g in range(1, min(tune.groups, room) + 1) if plan.groups % g == 0)
    tokens = max(t for t in range(1, tune.tokens + 1) if row_size % t == 0)
    blocks = plan.groups // groups
    processors = 4 if INTERPRET or not q.is_cuda else multiprocessors(q.device.index or 0)
    tiles = -(-width // tune.rows)
    shares = max(1, min(processors * tune.programs // (blocks * batch), tiles))
    value = torch.empty(batch, plan.groups, width, used, dtype=torch.bfloat16, device=q.device)
    part = torch.empty(batch, plan.groups, plan.queries, shares, dtype=torch.float32, device=q.device)
    factor = torch.empty(batch, plan.groups, used, dtype=torch.float32, device=q.device)
    options = {} if INTERPRET else {"num_warps": tune.warps, "maxnreg": tune.registers}
    scan_share[(shares * blocks, batch)](
        weight, middle, codes, scales, table, count, value, part, width, codes.stride(0) // 2, scales.stride(0),
        heads, queries, row_size, plan.words,
        plan.shared,
        groups, plan.groups, plan.columns, plan.queries, tune.rows, tokens, not INTERPRET, tune.stages, **options,
    )  # fmt: skip
    bins = 0 if histogram is None else BINS
    combine_shares[(batch * plan.groups, used)](
        part, factor, part if histogram is None else histogram, shares, 0 if histogram is None else histogram.numel(),
        used, plan.queries, 512, 0 if histogram is None else 256,
    )  # fmt: skip
    tiles = tune.sum_tiles if bins else 1
    sum_heads[(-(-width // (tune.sum_rows * tiles)), batch)](
        value, factor, count, worth, part if histogram is None else histogram, width, base, q_heads, plan.groups, used,
        plan.queries, tune.sum_rows, tiles, bins, SHIFT,
    )  # fmt: skip
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
    tune = tuning or Tuning()
    worth, count = worth.contiguous(), count.contiguous()
    batch, width = worth.shape
    base = lowest_bin(heads, budget)
    histogram = torch.zeros(batch, BINS + 2, dtype=torch.int32, device=worth.device)
    if width and batch:
        each = tune.sum_rows * tune.sum_tiles
        count_first[(-(-width // each), batch)](
            worth, count, histogram, width, base, tune.sum_rows, tune.sum_tiles, BINS, SHIFT
        )
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
    """See :func:`hisparse.ops.scan.scan_and_select`: the first digits are counted while the heads are summed."""
    if not len(codes) or not table.numel():
        worth = scan_rows(q, codes, scales, table, count, stats, scaling, bits, tuning)
        return select_top(worth, table, count, budget, wanted, tuning)
    base = lowest_bin(q.shape[1], budget)
    histogram = torch.empty(q.shape[0], BINS + 2, dtype=torch.int32, device=q.device)
    worth = _scan(q, codes, scales, table, count, stats, scaling, bits, tuning, histogram, base)
    return _choose(worth, table, count, budget, wanted, histogram, base, tuning or Tuning())


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
    key, row = torch.empty(2, batch, max(width, 1), dtype=torch.int32, device=worth.device)
    if not batch:
        return Chosen(rows, chosen)
    table, count = table.contiguous(), count.contiguous()
    limits = count if wanted is None else wanted.contiguous()
    limited = wanted is not None
    if width:
        take_first[(-(-width // tune.take_rows), batch)](
            worth,
            table,
            count,
            limits,
            histogram,
            rows,
            key,
            row,
            width,
            budget,
            base,
            tune.take_rows,
            BINS,
            SHIFT,
            limited,
        )
    options = {} if INTERPRET else {"num_warps": 8}
    take_rest[(batch,)](
        table, count, limits, histogram, rows, chosen, key, row, width, budget, 1024, BINS, max(width, 1).bit_length(),
        limited, **options,
    )  # fmt: skip
    return Chosen(rows, chosen)


__all__ = ["Plan", "Tuning", "plan_heads", "scan_and_select", "scan_rows", "select_top", "weights"]
