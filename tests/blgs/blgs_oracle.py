"""The plan again, token by token in plain Python and NumPy, from the planner's documentation alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hisparse.config import BlgsConfig


@dataclass
class Expected:
    keep: list[bool]
    anchor: list[bool]
    modes: list[int]
    blocks: list[tuple[int, int, int, int, int]]  # start, tokens, level, kept, distance
    demoted: int


def ranking(p: NDArray[np.float32], positions: list[int]) -> list[int]:
    return sorted(positions, key=lambda at: (-p[at], at))


def expected_modes(p: NDArray[np.float32], anchors: list[int], config: BlgsConfig) -> list[int]:
    if not anchors:
        return []
    cell, reach = config.min_block_size, config.max_block_size // config.min_block_size
    cells = -(-len(p) // cell)
    weight = {at: max(1, int(float(p[at]) * 65536)) for at in anchors}
    mass = np.zeros(cells, dtype=np.int64)
    for at in anchors:
        mass[at // cell] += weight[at]
    radius = max(1, reach // 16)
    box = np.ones(2 * radius + 1, dtype=np.int64)
    smooth = mass
    for _ in range(2):  # centred, cut at the ends
        smooth = np.convolve(smooth, box)[radius : radius + cells]
    modes = set()
    for here in range(cells):
        if mass[here] == 0:
            continue
        rivals = [
            c for c in range(max(0, here - 2 * reach), min(cells, here + 2 * reach + 1)) if mass[c] > 0 and c != here
        ]
        if any((smooth[c], -c) > (smooth[here], -here) for c in rivals):
            continue
        begin = spot = here * cell + cell // 2
        for _ in range(4):
            band = min(config.max_block_size, cell + abs(spot - begin))
            window = [at for at in anchors if max(0, spot - band) // cell <= at // cell <= (spot + band) // cell]
            if window:
                spot = sum(weight[at] * at for at in window) // sum(weight[at] for at in window)
        modes.add(min(anchors, key=lambda at: (abs(at - spot), at)))
    return sorted(modes)


def expected_plan(p: NDArray[np.float32], threshold: float, config: BlgsConfig, limit: int | None) -> Expected:
    length, cell = len(p), config.min_block_size
    passed = [at for at in range(length) if p[at] >= np.float32(threshold)]
    anchors = sorted(ranking(p, passed)[: len(passed) if limit is None else limit])
    modes = expected_modes(p, anchors, config)

    def gap(first: int, last: int) -> float:
        return min((max(0, first - m, m - last) for m in modes), default=math.inf)

    blocks, keep, start = [], set(anchors), 0
    while start < length:
        size = config.max_block_size
        while size > cell and (start % size or not _allowed(start, size, length, modes, cell)):
            size //= 2
        end = min(start + size, length)
        # Whole cells, also past the end of the sequence, count towards the distance.
        distance = gap(start, -(-end // cell) * cell - 1)
        remain = 1 - config.bandwidth_weight
        if distance == math.inf:
            share = 1.0 if remain == 1 else 0.0
        else:
            share = remain ** math.log2(1 + math.ceil(distance / cell)) if distance else 1.0
        quota = math.floor((end - start) * share + 0.5)
        inside = list(range(start, end))
        keep |= set(ranking(p, inside)[: max(quota, sum(at in anchors for at in inside))])
        blocks.append((start, end - start, size // cell, distance))
        start = end
    if limit is not None and len(keep) > limit:
        extra = ranking(p, sorted(keep - set(anchors)))
        keep = set(anchors) | set(extra[: limit - len(anchors)])
    rows = [
        (s, n, r.bit_length() - 1, sum(at in keep for at in range(s, s + n)), -1 if d == math.inf else int(d))
        for s, n, r, d in blocks
    ]
    return Expected(
        [at in keep for at in range(length)],
        [at in set(anchors) for at in range(length)],
        modes,
        rows,
        len(passed) - len(anchors),
    )


def _allowed(start: int, size: int, length: int, modes: list[int], cell: int) -> bool:
    last = -(-min(start + size, length) // cell) * cell - 1
    return all(max(0, start - m, m - last) >= max(1, int(0.5 * (size - cell))) for m in modes)
