"""Unpacking in plain torch. Codes stay in uint8 until the one fused multiply-add that scales and denormalises them:

x = (zero + code * step) * scale + mean = code * (step * scale) + (zero * scale + mean)
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.vtq.format import SPLIT_RATIO, PageFormat
from hisparse.vtq.stats import ChannelStats


def unpack_pages(
    pages: Tensor, stats: ChannelStats | None, fmt: PageFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.ops.unpack.unpack_pages`."""
    if fmt.raw_dtype is not None:
        size = fmt.heads * fmt.tokens * fmt.head_dim * fmt.raw_dtype.itemsize
        k, v = (
            pages[:, offset : offset + size]
            .view(len(pages), fmt.heads, -1)
            .transpose(0, 1)
            .contiguous()
            .view(fmt.raw_dtype)
            for offset in (0, fmt.raw_v_offset)
        )
        shape = (fmt.heads, len(pages), fmt.tokens, fmt.head_dim)
        return k.view(shape).to(dtype).permute(1, 2, 0, 3), v.view(shape).to(dtype).permute(1, 2, 0, 3)
    assert stats is not None  # checked by the public function
    k_offsets = (fmt.k_nibble_offset, fmt.k_extra_offset, fmt.k_scale_offset)
    v_offsets = (fmt.v_nibble_offset, fmt.v_extra_offset, fmt.v_scale_offset)
    k = _unpack(pages, fmt, fmt.k_bits, k_offsets, stats.k_mean, stats.k_scale, stats.runs, dtype)
    v = _unpack(pages, fmt, fmt.v_bits, v_offsets, stats.v_mean, stats.v_scale, ((0, 0, fmt.head_dim),), dtype)
    return k, v


def read_scales(pages: Tensor, fmt: PageFormat, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Step and zero, float32 [n, H, G], and which blocks are split, bool [n, H, G]."""
    stored = pages[:, offset : offset + fmt.heads * fmt.groups * 4].contiguous().view(torch.bfloat16).float()
    step, zero = stored.view(-1, fmt.heads, fmt.groups, 2).unbind(-1)
    return step.abs(), zero, step.signbit()


def read_codes(
    pages: Tensor, fmt: PageFormat, bits: int, nibble_offset: int, extra_offset: int, split: Tensor
) -> Tensor:
    """Codes uint8 [n, H, P, D] in stored channel order."""
    n, heads, tokens, half = len(pages), fmt.heads, fmt.tokens, fmt.head_dim // 2
    rows = heads * tokens
    nibbles = pages[:, nibble_offset : nibble_offset + rows * half].view(n, heads, tokens, half)
    codes = torch.empty(n, heads, tokens, 2, half, dtype=torch.uint8, device=pages.device)
    torch.bitwise_and(nibbles, 15, out=codes[..., 0, :])
    torch.bitwise_right_shift(nibbles, 4, out=codes[..., 1, :])
    if bits == 4:
        return codes.view(n, heads, tokens, fmt.head_dim)
    width = (bits - 4) * half // 4
    extra = pages[:, extra_offset : extra_offset + rows * width].view(n, heads, tokens, bits - 4, half // 4)
    # bits 4..5 of the code of each pair, in place: byte i, bits 2s..2s+1 -> pair s * (D/8) + i
    upper = torch.empty(n, heads, tokens, bits - 4, 4, half // 4, dtype=torch.uint8, device=pages.device)
    for s, shift in enumerate((4, 2, 0)):
        torch.bitwise_left_shift(extra, shift, out=upper[..., s, :])
    torch.bitwise_right_shift(extra, 2, out=upper[..., 3, :])
    upper &= 0x30
    if bits == 6:
        codes |= upper.view(n, heads, tokens, 2, half)
        return codes.view(n, heads, tokens, fmt.head_dim)
    pairs = upper.view(n, heads, tokens, half)
    if bool(split.all()):
        codes[..., 0, :] |= pairs
    else:
        shape = (n, heads, 1, fmt.groups, 1)
        grouped = pairs.view(n, heads, tokens, fmt.groups, -1)
        # a takes both bits where the block is split, else bit 4; b takes bit 5, moved to 4, unless split
        mask = torch.where(split, 0x30, 0x10).to(torch.uint8).view(shape)
        codes[..., 0, :] |= (grouped & mask).view_as(pairs)
        mask = torch.where(split, 0, 0x10).to(torch.uint8).view(shape)
        codes[..., 1, :] |= ((grouped >> 1) & mask).view_as(pairs)
    return codes.view(n, heads, tokens, fmt.head_dim)


def _unpack(
    pages: Tensor,
    fmt: PageFormat,
    bits: int,
    offsets: tuple[int, int, int],
    mean: Tensor,
    scale: Tensor,
    runs: tuple[tuple[int, int, int], ...],
    dtype: torch.dtype,
) -> Tensor:
    """Values [n, P, H, D] of one tensor, over memory [H, n, P, D]."""
    n, heads, tokens, dim = len(pages), fmt.heads, fmt.tokens, fmt.head_dim
    step, zero, split = read_scales(pages, fmt, offsets[2])
    codes = read_codes(pages, fmt, bits, offsets[0], offsets[1], split)
    if len(runs) > 1:
        mean, scale = (torch.cat([x[:, c : c + w] for _, c, w in runs], 1) for x in (mean, scale))
    fast = torch.where(split, step * SPLIT_RATIO, step)
    steps = torch.stack((step, fast), 2)[..., None]  # [n, H, 2, G, 1]
    grouped = scale.view(heads, 2, fmt.groups, -1)
    gain = (steps * grouped).view(n, heads, 1, dim)
    bias = torch.addcmul(mean.view_as(grouped), zero[:, :, None, :, None], grouped).view(n, heads, 1, dim)
    out = torch.empty(heads, n, tokens, dim, dtype=dtype, device=pages.device).transpose(0, 1)  # [n, H, P, D]
    for place, channel, width in runs:
        here = slice(place, place + width)
        values = torch.addcmul(bias[..., here], codes[..., here].float(), gain[..., here])
        out[..., channel : channel + width] = values
    return out.transpose(1, 2)
