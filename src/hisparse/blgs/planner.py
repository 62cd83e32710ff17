"""From importance to a block plan: one pass of integer arithmetic, linear in tokens, equal on CPU and CUDA.

Positions are gathered in cells of `min_block_size` tokens; everything but thresholding and ranking happens per cell.

1. anchors: importance >= threshold (the strongest `keep_limit` of them, if there are more).
2. maxima: the anchors' importance, summed per cell and smoothed with a triangular window, is largest within
   ``2 * max_block_size`` tokens on either side (so that a longest block finds room between two modes).
3. modes: each maximum is refined by mean shift (Fukunaga and Hostetler 1975; Comaniciu and Meer 2002) over the anchors'
   importance, with a bandwidth of one cell plus the distance already travelled from the maximum, and put on the nearest
   anchor.
4. blocks: a dyadic, aligned partition. A block of length s = min_block_size * 2**level is allowed where all of it lies
   at least ``GROWTH * (s - min_block_size)`` tokens from the nearest mode; its tiles are as wide as it is long.
5. quota: a block at distance d keeps the fraction ``(1 - bandwidth_weight) ** log2(1 + d / min_block_size)`` of its
   tokens: geometric in the rings around a mode, each ring being twice as wide as the one inside it, like the blocks.
   Anchors are kept in any case, and the rest of the quota goes to the most important tokens of the block.

Sums are taken over importance in units of 2**-16, in int64: they are exact in any order, so a GPU's order of summation
cannot change a plan, and every tensor-parallel rank finds the same one. Exact up to 2**23 tokens.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from hisparse.blgs.plan import NO_MODE, BlockPlan
from hisparse.blgs.select import check_importance, check_limits, strongest
from hisparse.blgs.tiny import plan_one_cell
from hisparse.config import BlgsConfig

GROWTH = 0.5
"""Distance from a mode, per token of added block length, from which a longer block is allowed."""
_UNIT = 1 << 16
_SHIFTS = 4
_FAR = 1 << 40
_FRACTION_BITS = 30
_MOST_RINGS = 4096
_SHORT = 32  # longer than that, tensors are faster than a list


def plan_blocks(
    importance: Tensor, threshold: float, config: BlgsConfig, channels: int, keep_limit: int | None = None
) -> BlockPlan:
    """Partition a sequence into blocks and decide which tokens are kept. Deterministic; linear in T.

    Args:
        importance: float [T], strictly inside (0, 1), on any device; the plan's tensors lie on the same.
        threshold: importance from which a token is an anchor (compared in float32).
        config: block sizes and bandwidth_weight.
        channels: channels of one layer's K or V (kv_heads * head_dim); tiles are clipped to it.
        keep_limit: most tokens that may be kept. Tokens beyond it are given up from the least important upwards,
            anchors last; an anchor given up no longer counts as one. Of equal tokens the earlier is kept.

    Raises:
        FormatError: importance is not a float vector, or a value is NaN or outside (0, 1).
        InputError: NaN threshold, channels < 1, or keep_limit < 0.
    """
    check_limits(threshold, channels, keep_limit)
    threshold = ctypes.c_float(threshold).value
    if importance.ndim == 1 and 0 < importance.shape[0] <= min(config.min_block_size, _SHORT):
        return plan_one_cell(importance, threshold, config, channels, keep_limit)
    p = check_importance(importance)
    length = p.shape[0]
    if length == 0:
        return _empty(p.device, config, channels)

    anchor = p >= threshold
    demoted = 0
    places = anchor.nonzero().squeeze(1)
    if keep_limit is not None and places.shape[0] > keep_limit:
        demoted = places.shape[0] - keep_limit
        places = places[strongest(p[places], keep_limit)]
        anchor = torch.zeros_like(anchor).index_fill_(0, places, True)

    cell = config.min_block_size
    cells = -(-length // cell)
    modes = find_modes(p, places, cells, config)
    gap = _distance(modes, cells, cell)
    level = _levels(gap, config)

    index = torch.arange(cells, device=p.device)
    first = (index & ((1 << level) - 1)) == 0
    start_cell = first.nonzero().squeeze(1)
    block_level = level[start_cell]
    start = start_cell * cell
    end = torch.clamp((start_cell + (1 << block_level)) * cell, max=length)
    tokens = end - start
    bounds = torch.cat([start_cell, torch.full_like(start_cell[:1], cells)])
    # The cell of a block that is nearest to a mode is its first or its last: a mode lies in no block above level 0.
    distance = torch.minimum(gap[start_cell], gap[bounds[1:] - 1])

    quota = _quota(tokens, distance, config)
    anchors_in = _count(places, bounds, cells, cell)
    keep = _fill(p, anchor, start, block_level, quota, anchors_in, config)
    kept = torch.maximum(quota, anchors_in)
    if keep_limit is not None and int(kept.sum()) > keep_limit:
        extra = (keep & ~anchor).nonzero().squeeze(1)
        chosen = extra[strongest(p[extra], keep_limit - places.shape[0])]
        keep = anchor.index_fill(0, chosen, True)
        kept = anchors_in + _count(chosen, bounds, cells, cell)

    return BlockPlan(
        keep=keep,
        anchor=anchor,
        modes=modes,
        start=start,
        tokens=tokens,
        channel_width=torch.clamp(cell << block_level, max=channels),
        level=block_level,
        kept=kept,
        distance=torch.where(distance >= _FAR, NO_MODE, distance),
        channels=channels,
        min_block_size=cell,
        demoted=demoted,
    )


def find_modes(p: Tensor, places: Tensor, cells: int, config: BlgsConfig) -> Tensor:
    """Positions int64 [M] of the density's modes, ascending; `places` int64 [A] are the anchors of `p` [T]."""
    if places.shape[0] == 0:
        return places
    cell = config.min_block_size
    reach = config.max_block_size // cell
    weight = torch.clamp((p[places] * _UNIT).long(), min=1)
    home = torch.div(places, cell, rounding_mode="floor")
    zeros = torch.zeros(cells, dtype=torch.int64, device=p.device)
    mass = zeros.index_add(0, home, weight)
    moment = zeros.index_add(0, home, weight * places)

    smooth = mass
    for _ in range(2):
        smooth = _box(smooth, max(1, reach // 16))
    order = torch.arange(cells - 1, -1, -1, device=p.device)
    key = torch.where(mass > 0, smooth * cells + order, -1)  # unique: the earlier of two equal cells is the maximum
    origin = ((key >= 0) & (key == _windowed_max(key, 2 * reach))).nonzero().squeeze(1)

    total, centre = pad(mass.cumsum(0), (1, 0)), pad(moment.cumsum(0), (1, 0))
    begin = origin * cell + cell // 2
    spot = begin
    for _ in range(_SHIFTS):
        band = torch.clamp(cell + (spot - begin).abs(), max=config.max_block_size)
        low = torch.div(torch.clamp(spot - band, min=0), cell, rounding_mode="floor")
        high = torch.clamp(torch.div(spot + band, cell, rounding_mode="floor") + 1, max=cells)
        # A maximum that wandered to the cap may see no anchor any more: it stays where it is.
        inside = total[high] - total[low]
        mean = torch.div(centre[high] - centre[low], torch.clamp(inside, min=1), rounding_mode="floor")
        spot = torch.where(inside > 0, mean, spot)

    after = torch.clamp(torch.searchsorted(places, spot), max=places.shape[0] - 1)
    right, left = places[after], places[torch.clamp(after - 1, min=0)]
    nearest = torch.where((spot - left).abs() <= (right - spot).abs(), left, right)
    modes: Tensor = torch.unique(nearest)
    return modes


def _box(values: Tensor, radius: int) -> Tensor:
    """Sum over ``[i - radius, i + radius]``, cut at the ends."""
    size = values.shape[0]
    running = pad(values.cumsum(0), (1, 0))
    index = torch.arange(size, device=values.device)
    return running[torch.clamp(index + radius + 1, max=size)] - running[torch.clamp(index - radius, min=0)]


def _windowed_max(values: Tensor, radius: int) -> Tensor:
    """Maximum over ``[i - radius, i + radius]`` in log2(radius) passes; `values` >= -1."""
    size = values.shape[0]
    wide = pad(values, (radius, radius), value=-1)
    span, window = 1, 2 * radius + 1
    while span < window:
        step = min(span, window - span)
        wide = torch.maximum(wide[: wide.shape[0] - step], wide[step:])
        span += step
    return wide[:size]


def _distance(modes: Tensor, cells: int, cell: int) -> Tensor:
    """int64 [cells]: tokens between a cell and the nearest mode, 0 where it holds one, >= _FAR without modes."""
    index = torch.arange(cells, device=modes.device)
    home = torch.div(modes, cell, rounding_mode="floor")
    before = torch.full_like(index, -2 * _FAR).scatter_reduce(0, home, modes, "amax")
    behind = torch.full_like(index, 2 * _FAR).scatter_reduce(0, home, modes, "amin")
    before = before.cummax(0).values
    behind = behind.flip(0).cummin(0).values.flip(0)
    left = torch.clamp(index * cell - before, min=0)
    right = torch.clamp(behind - (index * cell + cell - 1), min=0)
    return torch.minimum(left, right)


def _levels(gap: Tensor, config: BlgsConfig) -> Tensor:
    """int64 [cells]: level of the block that each cell belongs to."""
    cell = config.min_block_size
    top = (config.max_block_size // cell).bit_length() - 1
    cells = gap.shape[0]
    if top == 0:
        return torch.zeros_like(gap)
    needed = [max(1, int(GROWTH * cell * ((1 << level) - 1))) for level in range(1, top + 1)]
    allowed = torch.bucketize(gap, torch.tensor(needed, device=gap.device), right=True)
    # Beyond the end any level will do: the last block is cut, not split.
    pooled = pad(allowed, (0, -cells % (1 << top)), value=top)
    level = torch.zeros_like(pooled)
    for step in range(1, top + 1):
        pooled = torch.minimum(pooled[0::2], pooled[1::2])
        level += (pooled >= step).repeat_interleave(1 << step)
    return level[:cells]


@lru_cache(maxsize=16)
def _fractions(config: BlgsConfig) -> tuple[int, ...]:
    """Share of tokens kept, in units of 2**-_FRACTION_BITS, by distance in cells; the last entry is for no mode.

    The entry before the last also stands for every greater distance: there even the longest block keeps nothing, or the
    share hardly changes any more.
    """
    remain = 1 - config.bandwidth_weight
    scale = 1 << _FRACTION_BITS
    table = [scale]
    while remain < 1 and table[-1] * config.max_block_size * 2 >= scale and len(table) < _MOST_RINGS:
        table.append(round(scale * remain ** math.log2(1 + len(table))))
    return (*table, scale if remain == 1 else 0)


def _quota(tokens: Tensor, distance: Tensor, config: BlgsConfig) -> Tensor:
    """int64 [B]: tokens a block keeps by its distance alone, rounded to the nearest."""
    table = torch.tensor(_fractions(config), device=tokens.device)
    ring = torch.div(distance + config.min_block_size - 1, config.min_block_size, rounding_mode="floor")
    entry = torch.where(distance >= _FAR, table.shape[0] - 1, torch.clamp(ring, max=table.shape[0] - 2))
    share = table[entry]
    return (tokens * share + (1 << (_FRACTION_BITS - 1))) >> _FRACTION_BITS


def _count(places: Tensor, bounds: Tensor, cells: int, cell: int) -> Tensor:
    """int64 [B]: how many of `places` lie in each block; `bounds` [B + 1] are the blocks' limits in cells."""
    home = torch.div(places, cell, rounding_mode="floor")
    per_cell = torch.zeros(cells, dtype=torch.int64, device=places.device).index_add(0, home, torch.ones_like(home))
    running = pad(per_cell.cumsum(0), (1, 0))[bounds]
    return running[1:] - running[:-1]


def _fill(
    p: Tensor,
    anchor: Tensor,
    start: Tensor,
    level: Tensor,
    quota: Tensor,
    anchors_in: Tensor,
    config: BlgsConfig,
) -> Tensor:
    """bool [T]: the anchors, and in blocks with quota to spare their most important tokens.

    Anchors are the most important tokens of a block, so the first `quota` of its ranking are its anchors and the best
    of the others. Only blocks with something to rank are ranked, one batch of rows for each block length.
    """
    keep = anchor.clone()
    length = p.shape[0]
    spare = quota > anchors_in
    top = (config.max_block_size // config.min_block_size).bit_length() - 1
    for step in range(top + 1):
        size = config.min_block_size << step
        chosen = (spare & (level == step)).nonzero().squeeze(1)
        if chosen.shape[0] == 0:
            continue
        at = start[chosen, None] + torch.arange(size, device=p.device)
        inside = at < length
        at = torch.clamp(at, max=length - 1)
        rows = torch.where(inside, p[at], -1.0)
        ranked = rows.argsort(dim=1, descending=True, stable=True)
        taken = torch.arange(size, device=p.device) < quota[chosen, None]
        keep[at.gather(1, ranked)[taken]] = True
    return keep


def _empty(device: torch.device, config: BlgsConfig, channels: int) -> BlockPlan:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    mask = torch.zeros(0, dtype=torch.bool, device=device)
    return BlockPlan(mask, mask, none, none, none, none, none, none, none, channels, config.min_block_size, 0)
