"""The plan of a sequence that fits one cell, as when a generated token leaves the tail: plain Python, no tensor passes.

The same steps as the general planner with a single cell: an anchor makes it a level-0 block of full density around a
mode, no anchor makes it the (cut) start of a longest block far from any mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.blgs.plan import NO_MODE, BlockPlan
from hisparse.blgs.select import check_importance
from hisparse.config import BlgsConfig


def plan_one_cell(
    importance: Tensor, threshold: float, config: BlgsConfig, channels: int, keep_limit: int | None
) -> BlockPlan:
    """`plan_blocks` for 1 <= T <= min_block_size; `threshold` already rounded to float32."""
    values: list[float] = importance.tolist()
    if not importance.is_floating_point() or not all(0 < value < 1 for value in values):
        check_importance(importance)  # raises with the message
    length = len(values)
    limit = length if keep_limit is None else min(keep_limit, length)
    ranked = sorted(range(length), key=lambda at: (-values[at], at))
    passed = sum(value >= threshold for value in values)
    anchors = sorted(ranked[: min(passed, limit)])
    modes = [_mode(values, anchors, config.min_block_size)] if anchors else []

    full = bool(anchors) or config.bandwidth_weight == 0
    kept = ranked[: limit if full else 0]
    top = (config.max_block_size // config.min_block_size).bit_length() - 1
    level = 0 if anchors else top
    keep, anchor = [False] * length, [False] * length
    for at in kept:
        keep[at] = True
    for at in anchors:
        anchor[at] = True

    device = importance.device
    width = min(config.min_block_size << level, channels)
    table = torch.tensor([0, length, width, level, len(kept), 0 if anchors else NO_MODE], device=device).unsqueeze(1)
    start, tokens, channel_width, levels, kept_in, distance = table.unbind(0)
    return BlockPlan(
        keep=torch.tensor(keep, device=device),
        anchor=torch.tensor(anchor, device=device),
        modes=torch.tensor(modes, dtype=torch.int64, device=device),
        start=start,
        tokens=tokens,
        channel_width=channel_width,
        level=levels,
        kept=kept_in,
        distance=distance,
        channels=channels,
        min_block_size=config.min_block_size,
        demoted=passed - len(anchors),
    )


def _mode(values: list[float], anchors: list[int], cell: int) -> int:
    """The anchor nearest to the centre of mass: every shift's window holds the whole cell, so one shift settles it."""
    weights = [max(1, int(values[at] * 65536)) for at in anchors]
    spot = sum(weight * at for weight, at in zip(weights, anchors, strict=True)) // sum(weights)
    return min(anchors, key=lambda at: (abs(at - spot), at))
