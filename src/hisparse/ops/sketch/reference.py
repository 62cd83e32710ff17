"""Sketches in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops.sketch import rotation
from hisparse.vtq.stats import ChannelStats

# Step of the uniform quantiser with the least squared error for a standard normal, by number of levels (Max, 1960).
STEP = {1: 1.5958, 2: 0.9957}


def build_sketch(keys: Tensor, stats: ChannelStats, bits: int) -> tuple[Tensor, Tensor]:
    n, rows, heads, dim = keys.shape
    levels, middle = 2**bits, (2**bits - 1) / 2
    x = (keys.float() - stats.k_mean) / stats.k_scale
    x = x @ rotation(dim, keys.device)  # [n, R, H, D]
    norm2 = x.square().sum(-1)
    step = (norm2 / dim).sqrt_().mul_(STEP[bits]).clamp_min_(1e-20)
    code = (x / step[..., None] + levels / 2).floor_().clamp_(0, levels - 1)
    dot = ((code - middle) * x).sum(-1)
    scale = norm2 / dot.clamp_min(1e-20)
    exponent = scale.clamp_min_(2.0**-8).log2_().mul_(16).round_().add_(128).clamp_(0, 255)
    per_byte = 8 // bits
    planes = code.to(torch.uint8).view(n, rows, heads, per_byte, dim // per_byte)
    packed = planes[..., 0, :].clone()
    for s in range(1, per_byte):
        packed |= planes[..., s, :] << (bits * s)
    return packed, exponent.to(torch.uint8)


def score_sketch(queries: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float) -> Tensor:
    q_heads, chunk, dim = queries.shape
    n, rows, heads, width = codes.shape
    group, per_byte = q_heads // heads, dim // width
    bits = 8 // per_byte
    q = queries.float().view(heads, group, chunk, dim) * stats.k_scale[:, None, None]
    q = (q @ rotation(dim, queries.device)) * scaling
    # One matrix product serves all heads: a query's weights sit in its KV head's channels and are zero elsewhere. The codes
    # stay where they are in their byte (masked, not shifted); the weights are divided by the code's place value instead.
    place = torch.tensor([2.0 ** -(bits * s) for s in range(per_byte)], device=q.device)
    weights = q.new_zeros(per_byte, heads, width, heads, group * chunk)
    by_plane = (q.view(heads, group * chunk, per_byte, width) * place[:, None]).permute(2, 0, 3, 1)
    index = torch.arange(heads, device=q.device)
    weights[:, index, :, index] = by_plane.transpose(0, 1)
    weights = weights.view(per_byte, heads * width, q_heads * chunk)
    flat = codes.reshape(n * rows, heads * width)
    out = (flat & (2**bits - 1)).float() @ weights[0]
    for s in range(1, per_byte):
        out.addmm_((flat & ((2**bits - 1) << (bits * s))).float(), weights[s])
    out -= (q.sum(-1) * ((2**bits - 1) / 2)).view(-1)
    scale = torch.exp2((scales.reshape(n * rows, heads).float() - 128) / 16)
    out = out.view(n * rows, heads, group * chunk) * scale[..., None]
    return out.view(n * rows, q_heads, chunk).permute(1, 2, 0)
