"""Sketches in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops.sketch import STEP, coordinates
from hisparse.vtq.stats import ChannelStats


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
    b = (x[..., four:] / STEP[2] + 2).floor_().clamp_(0, 3).to(torch.uint8).unflatten(-1, (4, width))  # type: ignore[no-untyped-call]
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
    offset = torch.einsum("hcd,hd->hc", q, stats.k_mean).flatten()  # the share of the mean key
    q = q @ stats.query_basis[..., : four + two]
    # The codes stay where they are in their byte (masked, not shifted); the queries are divided by the place value instead.
    # One matrix product serves all heads: a query's weights sit in its KV head's bytes and are zero elsewhere.
    q[..., :four] *= STEP[4]
    q[..., four:] *= STEP[2]
    middle = 7.5 * q[..., :four].sum(-1) + 1.5 * q[..., four:].sum(-1)
    flat = codes.reshape(n * rows, 2, heads * width)
    out: Tensor | None = None
    for plane, mask, place, first in (
        (0, 0x0F, 1, 0),
        (0, 0xF0, 16, width),
        (1, 0x03, 1, four),
        (1, 0x0C, 4, four + width),
        (1, 0x30, 16, four + 2 * width),
        (1, 0xC0, 64, four + 3 * width),
    ):
        weights = torch.block_diag(*(q[..., first : first + width].mT / place))  # type: ignore[no-untyped-call]  # [H * width, H * count]
        values = (flat[:, plane] & mask).float()
        out = values @ weights if out is None else out.addmm_(values, weights)
    assert out is not None
    out -= middle.flatten()
    scale = torch.exp2((scales.reshape(n * rows, heads).float() - 128) / 16)
    out = out.view(n * rows, heads, count).mul_(scale[..., None]).view(n * rows, heads * count).add_(offset)
    return out.view(n * rows, q_heads, chunk).permute(1, 2, 0)
