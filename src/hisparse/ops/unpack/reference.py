"""Unpacking in plain torch. Codes stay in uint8 until the one fused multiply-add that scales and denormalises them:

x = (zero + code * step) * scale + mean = code * (step * scale) + (zero * scale + mean)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hisparse.vtq.format import SPLIT_RATIO, Fields, PageFormat
from hisparse.vtq.stats import ChannelStats, Runs, permute_channels

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
CHUNK_VALUES = 1 << 18


def unpack_pages(
    pages: Tensor, stats: ChannelStats | None, fmt: PageFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.ops.unpack.unpack_pages`."""
    if fmt.raw_dtype is not None:
        size = fmt.heads * fmt.tokens * fmt.head_dim * fmt.raw_dtype.itemsize
        k, v = (
            pages[:, offset : offset + size]
            .view(len(pages), fmt.heads, size // fmt.heads)
            .transpose(0, 1)
            .contiguous()
            .view(fmt.raw_dtype)
            for offset in (0, fmt.raw_v_offset)
        )
        shape = (fmt.heads, len(pages), fmt.tokens, fmt.head_dim)
        return k.view(shape).to(dtype).permute(1, 2, 0, 3), v.view(shape).to(dtype).permute(1, 2, 0, 3)
    assert stats is not None  # checked by the public function
    half = fmt.head_dim // 2
    k = _unpack(pages, fmt, fmt.k, stats.k_mean, stats.k_scale, stats.runs, dtype)
    v = _unpack(pages, fmt, fmt.v, stats.v_mean, stats.v_scale, ((0, 0, half), (half, half, half)), dtype)
    return k, v


def unpack_into(
    pages: Tensor, stats: ChannelStats | None, fmt: PageFormat, k: Tensor, v: Tensor, ids: Tensor | None
) -> None:
    """See :func:`hisparse.ops.unpack.unpack_into`."""
    chosen = pages if ids is None else pages.index_select(0, ids)
    for x, source in zip((k, v), unpack_pages(chosen, stats, fmt, k.dtype), strict=True):
        shape = (fmt.heads, len(chosen), fmt.tokens, fmt.head_dim)
        x.as_strided(shape, (x.stride(0), fmt.tokens * x.stride(1), *x.stride()[1:])).copy_(source.permute(2, 0, 1, 3))


def read_scales(pages: Tensor, fmt: PageFormat, field: Fields) -> tuple[Tensor, Tensor, Tensor]:
    """Step and zero, float32 [n, H, G], and which blocks are split, bool [n, H, G]."""
    stored = pages[:, field.scales : field.scales + fmt.heads * fmt.groups * 4].contiguous()
    step, zero = stored.view(torch.bfloat16).float().view(-1, fmt.heads, fmt.groups, 2).unbind(-1)
    return step.abs(), zero, step.signbit()


def read_codes(pages: Tensor, fmt: PageFormat, field: Fields, split: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the two halves of the stored channels, uint8 [n, H, P, D/2] each; `split` bool [n, H, G]."""
    n, half, eighth = len(pages), fmt.head_dim // 2, fmt.head_dim // 8
    rows = fmt.heads * fmt.tokens
    nibbles = pages[:, field.nibbles : field.nibbles + rows * half]
    a, b = nibbles & 15, nibbles >> 4
    shape = (n, fmt.heads, fmt.tokens, half)
    if field.bits == 6:
        extra = pages[:, field.extra : field.extra + rows * 2 * eighth].view(n, rows, 2, eighth)
        _add_bits(a, extra[:, :, 0], (4, 2, 0, -2), 0x30)
        _add_bits(b, extra[:, :, 1], (4, 2, 0, -2), 0x30)
    elif field.bits == 5:
        extra = pages[:, field.extra : field.extra + rows * eighth].view(n, rows, eighth)
        if bool(split.all()):
            _add_bits(a, extra, (4, 2, 0, -2), 0x30)
        else:
            _add_bits(a, extra, (4, 2, 0, -2), 0x10)
            _add_bits(b, extra, (3, 1, -1, -3), 0x10)
            if bool(split.any()):  # the upper bit of a pair is bit 4 of b, but bit 5 of a in a split block
                grouped = (n, fmt.heads, fmt.tokens, fmt.groups, -1)
                bit = (b & 0x10).view(grouped) * split[:, :, None, :, None]
                a |= bit.view(n, -1) << 1
                b ^= bit.view(n, -1)
    return a.view(shape), b.view(shape)


def _add_bits(codes: Tensor, extra: Tensor, shifts: tuple[int, int, int, int], mask: int) -> None:
    """codes[pair s * (D/8) + i] |= extra[i] << shifts[s] & mask, for `codes` uint8 [n, rows * D/2], `extra` [n, rows,
    D/8].

    Works on the widest integers that divide D/8 bytes: bits that a shift carries into the next byte are masked away.
    """
    n, rows, eighth = extra.shape
    dtype = next(t for t in _WORDS if eighth % t.itemsize == 0)
    words = int.from_bytes(bytes([mask] * dtype.itemsize), "little")
    source = extra.contiguous().view(dtype)
    quarters = codes.view(n, rows, 4, eighth).view(dtype)
    for s, shift in enumerate(shifts):
        bits = source << shift if shift > 0 else source >> -shift
        quarters[:, :, s] |= bits.bitwise_and_(words) if shift else source & words


def _unpack(
    pages: Tensor, fmt: PageFormat, field: Fields, mean: Tensor, scale: Tensor, runs: Runs, dtype: torch.dtype
) -> Tensor:
    """Values [n, P, H, D] of one tensor, over memory [H, n, P, D]."""
    n, heads, tokens, dim = len(pages), fmt.heads, fmt.tokens, fmt.head_dim
    scales = permute_channels(scale, runs).view(heads, 2, fmt.groups, -1)
    means = permute_channels(mean, runs).view_as(scales)
    step, zero, split = read_scales(pages, fmt, field)
    fast = torch.where(split, step * SPLIT_RATIO, step)
    steps = torch.stack((step, fast), 2)[..., None]  # [n, H, 2, G, 1]
    by_channel = sorted(runs, key=lambda run: run[1])
    gains, biases = (
        torch.cat([x.view(n, heads, 1, dim)[..., place : place + width] for place, _, width in by_channel], -1)
        for x in (steps * scales, torch.addcmul(means, zero[:, :, None, :, None], scales))
    )
    out = torch.empty(heads, n, tokens, dim, dtype=dtype, device=pages.device)
    # On CPU a chunk's codes and floats stay in the cache; on a GPU one launch for all pages is best.
    chunk = max(n, 1) if pages.is_cuda else max(1, CHUNK_VALUES // (heads * tokens * dim))
    for start in range(0, n, chunk):
        here = slice(start, start + chunk)
        codes = _in_channel_order(*read_codes(pages[here], fmt, field, split[here]), runs)
        target = out[:, here].transpose(0, 1)  # [m, H, P, D]
        if dtype == torch.float32:
            torch.addcmul(biases[here], codes, gains[here], out=target)
        else:
            target.copy_(torch.addcmul(biases[here], codes, gains[here]))
    return out.permute(1, 2, 0, 3)


def _in_channel_order(a: Tensor, b: Tensor, runs: Runs) -> Tensor:
    """The codes uint8 [n, H, P, D] of the halves `a` and `b` [n, H, P, D/2] of the stored channels.

    Bytes are moved as the widest integers that divide every run: copying eight bytes costs no more than copying one.
    """
    half = a.shape[-1]
    word = math.gcd(half, *(number for run in runs for number in run))
    dtype = next(t for t in _WORDS if word % t.itemsize == 0)
    out = torch.empty(*a.shape[:-1], 2 * half, dtype=torch.uint8, device=a.device)
    halves, target = (a.view(dtype), b.view(dtype)), out.view(dtype)
    for place, channel, width in runs:
        first, to, length = (number // dtype.itemsize for number in (place % half, channel, width))
        target[..., to : to + length] = halves[place // half][..., first : first + length]
    return out
