"""What the tests of the sketch kernels share: made-up layers and an independent oracle in float64 numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hisparse.vtq.stats import ChannelStats


def make_stats(heads: int, dim: int, seed: int = 0) -> ChannelStats:
    """Statistics with offset channels and a well-conditioned basis."""
    make = torch.Generator().manual_seed(seed)
    mean = torch.randn(heads, dim, generator=make) * 3
    scale = torch.rand(heads, dim, generator=make) + 0.5
    rotation = torch.linalg.qr(torch.randn(heads, dim, dim, generator=make)).Q
    basis = rotation * (torch.rand(heads, 1, dim, generator=make) + 0.5)
    order = torch.arange(dim).view(2, 2, -1).flip(1).transpose(0, 1).reshape(-1)
    return ChannelStats(mean, scale, mean.flip(1).contiguous(), scale.flip(1).contiguous(), order, basis.contiguous())


def decode_keys(codes: Tensor, scales: Tensor, heads: int, dim: int, bits: int) -> np.ndarray:
    """Coordinates float64 [tokens, H, D] (absent ones 0) of flat sketches: codes [tokens, H * D * bits / 8]."""
    raw, scale = codes.cpu().numpy().astype(int), scales.cpu().numpy().astype(float)
    tokens, width = len(raw), dim * bits // 16
    out = np.zeros((tokens, heads, dim))
    for h in range(heads):
        for i in range(width):
            high, low = raw[:, h * width + i], raw[:, (heads + h) * width + i]
            out[:, h, i] = (high % 16 - 7.5) * 0.3352
            out[:, h, i + width] = (high // 16 - 7.5) * 0.3352
            for s in range(4):
                out[:, h, 2 * width + s * width + i] = (low // 4**s % 4 - 1.5) * 0.9957
    return out * 2 ** ((scale[:, :, None] - 128) / 16)


def oracle_scores(
    q: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float, bits: int
) -> np.ndarray:
    """float64 [Hq, tokens] of one query [Hq, D], the mean key's share included."""
    heads, dim = stats.heads, stats.head_dim
    keys = decode_keys(codes, scales, heads, dim, bits)
    inverse = np.linalg.inv(stats.sketch_basis.double().cpu().numpy())
    keys = np.einsum("thc,hcd->thd", keys, inverse) + stats.k_mean.double().cpu().numpy()
    grouped = q.double().cpu().numpy().reshape(heads, -1, dim)
    return scaling * np.einsum("hqd,thd->hqt", grouped, keys).reshape(-1, len(keys))


def oracle_worth(scores: np.ndarray, row_size: int) -> np.ndarray:
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    return np.sqrt(share.reshape(len(share), -1, row_size).sum(-1)).sum(0)
