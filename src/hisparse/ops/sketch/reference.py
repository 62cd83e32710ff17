"""Sketches in plain torch."""

from __future__ import annotations

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
    width = four // 2  # bytes of a head's four-bit codes, and of its two-bit codes
    x = (keys.float() - stats.k_mean).flatten(0, 1).transpose(0, 1) @ stats.sketch_basis[
        ..., : four + two
    ]  # [H, nR, C]
    exponent = x.square().mean(-1).clamp_min_(2.0**-15).log2_().mul_(8).round_().add_(128).clamp_(0, 255)
    x = x.mul_(torch.exp2((128 - exponent) / 16)[..., None]).transpose(0, 1)  # [nR, H, C]
    a = (x[..., :four] / STEP[4] + 8).floor_().clamp_(0, 15).to(torch.uint8)
    b = (x[..., four:] / STEP[2] + 2).floor_().clamp_(0, 3).to(torch.uint8).view(-1, heads, 4, width)
    high = a[..., :width] | a[..., width:] << 4
    low = b[..., 0, :] | b[..., 1, :] << 2 | b[..., 2, :] << 4 | b[..., 3, :] << 6
    codes = torch.cat([high.flatten(1), low.flatten(1)], dim=1)
    return codes.view(n, rows, 2 * heads * width), exponent.t().to(torch.uint8).reshape(n, rows, heads)


def score_sketch(queries: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float) -> Tensor:
    q_heads, chunk, dim = queries.shape
    n, rows, heads = scales.shape
    count = q_heads // heads * chunk  # queries of one KV head
    width = codes.shape[2] // (2 * heads)
    four, two = 2 * width, 4 * width
    q = queries.float().reshape(heads, count, dim) * scaling
    offset = torch.einsum("hcd,hd->hc", q, stats.k_mean)  # the share of the mean key
    q = q @ stats.query_basis[..., : four + two]
    q[..., :four] *= STEP[4]
    q[..., four:] *= STEP[2]
    middle = 7.5 * q[..., :four].sum(-1) + 1.5 * q[..., four:].sum(-1)
    if not n:
        return q.new_empty(q_heads, chunk, 0)
    flat = codes.reshape(n * rows, 2 * heads * width)
    product = _by_table if count <= TABLE_QUERIES and not q.is_cuda else _by_matrix
    out = product(q, flat, width)  # [H, count, nR]: tokens innermost from here on
    scale = torch.exp2((scales.reshape(n * rows, heads).float() - 128) / 16).t()
    out.sub_(middle[..., None]).mul_(scale[:, None]).add_(offset[..., None])
    return out.view(q_heads, chunk, n * rows)


def _by_table(q: Tensor, flat: Tensor, width: int) -> Tensor:
    """Products of q [H, count, C] with the codes in flat [nR, 2 * H * width], float32 [H, count, nR].

    What a byte adds to a score is looked up: its 256 values are multiplied out once. A CPU core sums looked-up rows
    faster than it masks, converts and multiplies the same bytes, as long as the rows are short.
    """
    heads, count, _ = q.shape
    byte = torch.arange(256, device=q.device)
    fours = torch.stack([byte & 15, byte >> 4]).float()  # [2, 256]
    twos = torch.stack([byte >> shift & 3 for shift in (0, 2, 4, 6)]).float()  # [4, 256]
    by_plane = q[..., : 2 * width].reshape(heads, count, 2, width), q[..., 2 * width :].reshape(heads, count, 4, width)
    tables = [
        torch.einsum("hcsi,sb->hibc", coordinates, digits)
        for coordinates, digits in zip(by_plane, (fours, twos), strict=True)
    ]
    table = torch.stack(tables).view(-1, count)  # [2 * H * width * 256, count]
    index = flat.int().add_(torch.arange(0, len(table), 256, dtype=torch.int32, device=q.device))
    sums = embedding_bag(index.view(-1, width), table, mode="sum").view(len(flat), 2 * heads * count)
    planes = sums.t().contiguous().view(2, heads, count, len(flat))
    return planes[0].add_(planes[1])


def _by_matrix(q: Tensor, flat: Tensor, width: int) -> Tensor:
    """As :func:`_by_table`, by one matrix product a bit field.

    The codes stay where they are in their byte (masked, not shifted); the queries are divided by the place value
    instead. One product serves all heads: a query's weights sit in its KV head's bytes and are zero elsewhere.
    """
    heads, count, _ = q.shape
    planes = flat.view(len(flat), 2, heads * width)
    out = q.new_zeros(len(flat), heads * count)
    for plane, mask, place, first in (
        (0, 0x0F, 1, 0),
        (0, 0xF0, 16, width),
        (1, 0x03, 1, 2 * width),
        (1, 0x0C, 4, 3 * width),
        (1, 0x30, 16, 4 * width),
        (1, 0xC0, 64, 5 * width),
    ):
        weights = _block_diagonal(q[..., first : first + width].mT / place)  # [H * width, H * count]
        out.addmm_((planes[:, plane] & mask).float(), weights)
    return out.t().contiguous().view(heads, count, len(flat))


def _block_diagonal(blocks: Tensor) -> Tensor:
    """[H, a, b] -> [H * a, H * b] with the blocks on its diagonal."""
    heads, a, b = blocks.shape
    out = blocks.new_zeros(heads, a, heads, b)
    index = torch.arange(heads, device=blocks.device)
    out[index, :, index] = blocks
    return out.view(heads * a, heads * b)
