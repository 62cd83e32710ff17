"""The peak test: how far apart the components of a two-component Gaussian mixture of a block's values lie."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 4


def peak_separation(values: Tensor, lo: Tensor | None = None, hi: Tensor | None = None) -> Tensor:
    """Distance of the two component means over the range of the block: float32 [B], for `values` float32 [B, m].

    All blocks are fitted in one pass of STEPS expectation-maximisation steps (Dempster, Laird and Rubin 1977) started
    at mean -/+ one standard deviation. Both components have their own weight and variance; a variance is at least 1e-4
    of the block's, so that a component cannot collapse onto one value. `lo` and `hi`, the blocks' minima and maxima,
    are computed where they are not given. A block of one value has separation 0.
    """
    if lo is None or hi is None:
        lo, hi = values.aminmax(dim=-1)
    extent = hi - lo
    safe = torch.where(extent > 0, extent, torch.ones_like(extent))
    x = (values - lo[:, None]) / safe[:, None]
    powers = torch.stack((torch.ones_like(x), x, x * x), -1)  # [B, m, 3]
    total = powers.mean(1)  # moments 0, 1, 2 of the block
    variance = (total[:, 2] - total[:, 1].square()).clamp_min(1e-12)
    floor = 1e-4 * variance
    deviation = variance.sqrt()
    mean = torch.stack((total[:, 1] - deviation, total[:, 1] + deviation), -1)
    var = variance[:, None].expand(-1, 2)
    weight = torch.full_like(mean, 0.5)
    for _ in range(STEPS):
        # log odds of the upper component are a quadratic in x: one matrix product, one sigmoid, one matrix product
        precision = var.reciprocal()
        constant = (weight.square() * precision).log() - mean.square() * precision
        quadratic = torch.stack((constant, 2 * mean * precision, -precision), -1)  # [B, 2, 3]
        odds = 0.5 * (quadratic[:, 1] - quadratic[:, 0])
        upper = torch.sigmoid(torch.bmm(powers, odds[:, :, None])).squeeze(-1)
        moments = torch.bmm(upper[:, None], powers).squeeze(1) / x.shape[1]
        both = torch.stack((total - moments, moments), 1)  # [B, 2, 3]
        weight = both[..., 0].clamp_min(1e-6)
        mean = both[..., 1] / weight
        var = torch.maximum(both[..., 2] / weight - mean.square(), floor[:, None])
    distance = (mean[:, 1] - mean[:, 0]).abs().clamp(0, 1)
    return torch.where(extent > 0, distance, torch.zeros_like(distance))
