"""Sketches: the few bits of a key that stay on the device when its token is set aside, and the scores read from them.

A key is normalised per channel, rotated by an orthonormal Hadamard matrix (which spreads outliers over all channels, so
that one or two bits a channel are enough), and rounded to 2**bits uniform levels ``code - (2**bits - 1) / 2``. One more
byte holds ``round(16 * log2(scale)) + 128``, with scale chosen so that the estimate of the key's dot product with itself
is exact (Gao and Long, RaBitQ, 2024): ``scale = |x|**2 / <x, levels>``.

Layout: codes uint8 [rows, R, H, D * bits / 8], byte i at bit offset ``bits * s`` holding rotated channel
``s * (D * bits / 8) + i``; scales uint8 [rows, R, H].
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hisparse.ops._dispatch import select_backend
from hisparse.vtq.stats import ChannelStats


def sketch_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one token's sketch in one KV head, its scale included."""
    return head_dim * bits // 8 + 1


@functools.lru_cache(maxsize=16)
def _rotation_cpu(dim: int) -> Tensor:
    power = dim & -dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < power:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    odd = dim // power
    if odd > 1:  # an orthonormal DCT mixes the odd factor: head_dim 96 = 32 x 3
        i, j = torch.meshgrid(torch.arange(odd), torch.arange(odd), indexing="ij")
        dct = torch.cos(torch.pi * (2 * j + 1) * i / (2 * odd)).double()
        dct[0] /= 2**0.5
        matrix = torch.kron(matrix, dct * (2 / odd) ** 0.5)
    return (matrix / power**0.5).float()


@functools.lru_cache(maxsize=64)
def rotation(dim: int, device: torch.device) -> Tensor:
    """Orthonormal float32 [dim, dim] mixing every channel into every other; the Hadamard matrix where dim is a power of 2."""
    return _rotation_cpu(dim).to(device)


def build_sketch(keys: Tensor, stats: ChannelStats, bits: int) -> tuple[Tensor, Tensor]:
    """Sketch keys.

    keys: [n, R, H, D], post-RoPE, any float dtype. bits: 1 or 2.
    Returns codes uint8 [n, R, H, D * bits / 8] and scales uint8 [n, R, H].
    """
    return select_backend("sketch", keys.device).build_sketch(keys, stats, bits)  # type: ignore[no-any-return]


def score_sketch(queries: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float) -> Tensor:
    """Estimated attention scores, up to a constant a query (which no ranking of tokens sees).

    queries: [Hq, T, D] post-RoPE. codes, scales: rows of `build_sketch` (n rows of R tokens).
    Returns float32 [Hq, T, n * R]: ``scaling * <q, k - mean>``.
    """
    return select_backend("sketch", queries.device).score_sketch(queries, codes, scales, stats, scaling)  # type: ignore[no-any-return]
