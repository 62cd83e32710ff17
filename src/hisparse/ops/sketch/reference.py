"""Sketches in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from hisparse.ops.sketch import STEP, coordinates
from hisparse.vtq.stats import ChannelStats

TABLE_QUERIES = 8
"""Up to how many queries a KV head products are looked up in tables on the CPU."""


def build_sketch(keys: Tensor, stats: ChannelStats, bits: int) -> tuple[Tensor, Tensor]:
    n, rows, heads, dim = keys.shape
    four, two = coordinates(dim, bits)
    pairs = four // 2  # pairs of bytes: one of four-bit codes, one of two-bit codes
    x = (keys.float() - stats.k_mean).flatten(0, 1).transpose(0, 1) @ stats.sketch_basis[
        ..., : four + two
    ]  # [H, nR, C]
    exponent = x.square().mean(-1).clamp_min_(2.0**-15).log2_().mul_(8).round_().add_(128).clamp_(0, 255)
    x = x.mul_(torch.exp2((128 - exponent) / 16)[..., None])
    a = (x[..., :four] / STEP[4] + 8).floor_().clamp_(0, 15).to(torch.uint8)
    b = (x[..., four:] / STEP[2] + 2).floor_().clamp_(0, 3).to(torch.uint8).view(heads, n * rows, 4, pairs)
    even = a[..., :pairs] | a[..., pairs:] << 4
    odd = b[..., 0, :] | b[..., 1, :] << 2 | b[..., 2, :] << 4 | b[..., 3, :] << 6
    codes = torch.stack([even, odd], dim=-1).view(heads, n, rows, 2 * pairs)
    scales = exponent.to(torch.uint8).view(heads, n, rows)
    return codes.transpose(0, 1).contiguous(), scales.transpose(0, 1).contiguous()


def sketch_tokens(
    keys: Tensor,
    tokens: Tensor,
    stats: ChannelStats,
    bits: int,
    codes: Tensor,
    scales: Tensor,
    places: Tensor,
    build: Callable[[Tensor, ChannelStats, int], tuple[Tensor, Tensor]] = build_sketch,
) -> None:
    """See :func:`hisparse.ops.sketch.sketch_tokens`. build: the twin that sketches what has been gathered."""
    found = build(keys[tokens], stats, bits)
    codes[places], scales[places] = (x.flatten(1) for x in found)


def score_sketch(queries: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float) -> Tensor:
    q_heads, chunk, dim = queries.shape
    n, heads, rows, width = codes.shape
    count = q_heads // heads * chunk  # queries of one KV head
    four, two = width, 2 * width
    q = queries.float().reshape(heads, count, dim) * scaling
    offset = torch.einsum("hcd,hd->hc", q, stats.k_mean)  # the share of the mean key
    q = q @ stats.query_basis[..., : four + two]
    q[..., :four] *= STEP[4]
    q[..., four:] *= STEP[2]
    middle = 7.5 * q[..., :four].sum(-1) + 1.5 * q[..., four:].sum(-1)
    if not n:
        return q.new_empty(q_heads, chunk, 0)
    product = _by_table if count <= TABLE_QUERIES and not q.is_cuda else _by_matrix
    out = product(q, codes)  # [H, count, nR]: tokens innermost from here on
    scale = torch.exp2((scales.transpose(0, 1).reshape(heads, n * rows).float() - 128) / 16)
    out.sub_(middle[..., None]).mul_(scale[:, None]).add_(offset[..., None])
    return out.reshape(q_heads, chunk, n * rows)


def _by_table(q: Tensor, codes: Tensor) -> Tensor:
    """Products of q [H, count, C] with codes [n, H, R, W], float32 [H, count, nR].

    What a byte adds to a score is looked up: its 256 values are multiplied out once. A CPU core sums looked-up rows
    faster than it masks, converts and multiplies the same bytes, as long as the rows are short.
    """
    heads, count, _ = q.shape
    n, _, rows, width = codes.shape
    byte = torch.arange(256, device=q.device)
    fours = torch.stack([byte & 15, byte >> 4]).float()  # [2, 256]
    twos = torch.stack([byte >> shift & 3 for shift in (0, 2, 4, 6)]).float()  # [4, 256]
    even = torch.einsum("hcsi,sb->hibc", q[..., :width].reshape(heads, count, 2, width // 2), fours)
    odd = torch.einsum("hcsi,sb->hibc", q[..., width:].reshape(heads, count, 4, width // 2), twos)
    table = torch.stack([even, odd], dim=2).view(-1, count)  # [H * W * 256, count]
    start = torch.arange(0, len(table), 256, dtype=torch.int32, device=q.device).view(heads, 1, width)
    start = start.expand(heads, rows, width).reshape(-1)  # as long as a row: short loops cost more than they add
    index = codes.reshape(n, -1).int().add_(start)
    sums = embedding_bag(index.view(-1, width), table, mode="sum")
    return sums.view(n, heads, rows, count).permute(1, 3, 0, 2).reshape(heads, count, n * rows)


def _by_matrix(q: Tensor, codes: Tensor) -> Tensor:
    """As :func:`_by_table`, by one matrix product a bit field.

    The codes stay where they are in their byte (masked, not shifted); the queries are divided by the place value
    instead.
    """
    heads, count, _ = q.shape
    n, _, rows, width = codes.shape
    pairs = width // 2
    byte = codes.transpose(0, 1).reshape(heads, n * rows, pairs, 2)
    out = q.new_zeros(heads, n * rows, count)
    for which, mask, place, first in (
        (0, 0x0F, 1, 0),
        (0, 0xF0, 16, pairs),
        (1, 0x03, 1, 2 * pairs),
        (1, 0x0C, 4, 3 * pairs),
        (1, 0x30, 16, 4 * pairs),
        (1, 0xC0, 64, 5 * pairs),
    ):
        out.baddbmm_((byte[..., which] & mask).float(), (q[..., first : first + pairs] / place).mT)
    return out.mT.contiguous()
