"""The scan in plain torch: the sketch and selection ops, one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops.scan import Chosen
from hisparse.ops.sketch.reference import score_sketch
from hisparse.vtq.stats import ChannelStats


def scan_rows(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    table: Tensor,
    count: Tensor,
    stats: ChannelStats,
    scaling: float,
    bits: int,
) -> Tensor:
    """See :func:`hisparse.ops.scan.scan_rows`."""
    row_size = scales.shape[1] // stats.heads
    worth = torch.full(table.shape, float("-inf"), device=q.device)
    for i, used in enumerate(count.tolist()):
        if not used:
            continue
        ids = table[i, :used].long()
        scores = score_sketch(
            q[i][:, None],
            codes[ids].view(used, stats.heads, row_size, -1),
            scales[ids].view(used, stats.heads, row_size),
            stats,
            scaling,
        )
        share = scores[:, 0].softmax(-1).view(-1, used, row_size).sum(-1)  # [Hq, used]
        worth[i, :used] = share.sqrt_().sum(0)
    return worth


def select_top(worth: Tensor, table: Tensor, count: Tensor, budget: int, wanted: Tensor | None) -> Chosen:
    """See :func:`hisparse.ops.scan.select_top`."""
    batch, width = table.shape
    limits = [budget] * batch if wanted is None else [min(budget, w) for w in wanted.tolist()]
    rows = torch.zeros(batch, budget, dtype=torch.int32, device=table.device)
    numbers = [min(used, width, limit) for used, limit in zip(count.tolist(), limits, strict=True)]
    for i, number in enumerate(numbers):
        used = int(count[i])
        # A stable sort, so that of equal rows the first is taken.
        best = worth[i, :used].sort(descending=True, stable=True).indices[:number]
        rows[i, :number] = table[i, best]
    return Chosen(rows, torch.tensor(numbers, dtype=torch.int32, device=table.device))


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
) -> Chosen:
    """See :func:`hisparse.ops.scan.scan_and_select`."""
    return select_top(scan_rows(q, codes, scales, table, count, stats, scaling, bits), table, count, budget, wanted)
