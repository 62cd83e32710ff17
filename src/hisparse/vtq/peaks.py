"""The peak test: how far apart the components of a two-component Gaussian mixture of a block's values lie."""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 32
STEPS = 16


def peak_separation(values: Tensor, lo: Tensor | None = None, hi: Tensor | None = None) -> Tensor:
    """Distance of the two component means over the range of the block: float32 [B], for `values` float32 [B, m].

    All blocks are fitted in one pass, by STEPS steps of expectation maximisation (Dempster, Laird and Rubin 1977) from
    mean -/+ one standard deviation; each component has its own weight and variance. The fit reads the values rounded to
    BINS levels of the range: a histogram takes one pass over the values, and the steps are then two small matrix
    products for all blocks together. The rounding shifts a mean by far less than a threshold of interest; a variance is
    at least that of the rounding, so that a component cannot collapse onto one value.

    `lo` and `hi`, the blocks' minima and maxima, are computed where they are not given. A block of one value, or one
    that holds inf or NaN, has separation 0.
    """
    if lo is None or hi is None:
        lo, hi = values.amin(-1), values.amax(-1)
    extent = hi - lo
    usable = (extent > 0) & extent.isfinite()
    rate = torch.where(usable, (BINS - 1) / extent, torch.zeros_like(extent))
    # NaN or inf times 0 is NaN, whose integer is anything: clamped, it lands in some bin of a block that is not usable
    level = (values - lo[:, None]).mul_(rate[:, None]).add_(0.5).to(torch.int32).clamp_(0, BINS - 1)
    level += torch.arange(0, len(values) * BINS, BINS, dtype=torch.int32, device=values.device)[:, None]
    counts = torch.bincount(level.flatten(), minlength=len(values) * BINS)
    histogram = counts.view(-1, BINS).float() / values.shape[1]

    centre = torch.linspace(0, 1, BINS, device=values.device)
    powers = torch.stack((torch.ones_like(centre), centre, centre * centre), -1)  # [BINS, 3]
    floor = 1 / (12 * (BINS - 1) ** 2)
    total = histogram @ powers  # moments 0, 1, 2 of each block
    variance = (total[:, 2] - total[:, 1].square()).clamp_min(floor)
    deviation = variance.sqrt()
    mean = torch.stack((total[:, 1] - deviation, total[:, 1] + deviation), -1)
    var = variance[:, None].expand(-1, 2)
    weight = torch.full_like(mean, 0.5)
    for _ in range(STEPS):
        # The log odds of the upper component are a quadratic in the value.
        precision = var.reciprocal()
        constant = (weight.square() * precision).log() - mean.square() * precision
        quadratic = torch.stack((constant, 2 * mean * precision, -precision), -1)  # [B, 2, 3]
        upper = torch.sigmoid((quadratic[:, 1] - quadratic[:, 0]) @ (powers.T / 2))  # [B, BINS]
        moments = upper.mul_(histogram) @ powers
        both = torch.stack((total - moments, moments), 1)  # [B, 2, 3]
        weight = both[..., 0].clamp_min(1e-6)
        mean = both[..., 1] / weight
        var = (both[..., 2] / weight - mean.square()).clamp_min(floor)
    distance = (mean[:, 1] - mean[:, 0]).abs().clamp_(0, 1)
    return torch.where(usable, distance, torch.zeros_like(distance))
