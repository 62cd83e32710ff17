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


def decode_keys(codes: Tensor, scales: Tensor, bits: int) -> np.ndarray:
    """Coordinates float64 [n * R, H, D] (absent ones 0): codes [n, H, R, D * bits / 8], scales [n, H, R]."""
    raw, scale = codes.cpu().numpy().astype(int), scales.cpu().numpy().astype(float)
    n, heads, rows, width = raw.shape
    pairs = width // 2
    out = np.zeros((n, heads, rows, width * 8 // bits))
    for i in range(pairs):
        even, odd = raw[..., 2 * i], raw[..., 2 * i + 1]
        out[..., i] = (even % 16 - 7.5) * 0.3352
        out[..., pairs + i] = (even // 16 - 7.5) * 0.3352
        for s in range(4):
            out[..., (2 + s) * pairs + i] = (odd // 4**s % 4 - 1.5) * 0.9957
    out *= 2 ** ((scale[..., None] - 128) / 16)
    return out.transpose(0, 2, 1, 3).reshape(n * rows, heads, -1)


def oracle_scores(
    q: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float, bits: int
) -> np.ndarray:
    """float64 [Hq, tokens] of one query [Hq, D], the mean key's share included."""
    heads, dim = stats.heads, stats.head_dim
    keys = decode_keys(codes, scales, bits)
    inverse = np.linalg.inv(stats.sketch_basis.double().cpu().numpy())
    keys = np.einsum("thc,hcd->thd", keys, inverse) + stats.k_mean.double().cpu().numpy()
    grouped = q.double().cpu().numpy().reshape(heads, -1, dim)
    return scaling * np.einsum("hqd,thd->hqt", grouped, keys).reshape(-1, len(keys))


def oracle_worth(scores: np.ndarray, row_size: int) -> np.ndarray:
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    return np.sqrt(share.reshape(len(share), -1, row_size).sum(-1)).sum(0)
