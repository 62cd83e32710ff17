"""Packing in plain torch, vectorised over pages, heads and groups; runs on CPU and CUDA tensors.

Per block: zero = min rounded down to bfloat16, step = (max - zero) / levels rounded up to bfloat16, so the codes cover the
range and every value lies within half a step of its code; code = floor((x - zero) * (1 / step) + 0.5) in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.vtq.format import SPLIT_RATIO, PageFormat
from hisparse.vtq.peaks import peak_separation
from hisparse.vtq.stats import ChannelStats

_TINY = 2.0**-126  # smallest step: a subnormal one would have no finite inverse


def pack_pages(
    k: Tensor, v: Tensor, stats: ChannelStats | None, fmt: PageFormat, split: str, peak_threshold: float
) -> Tensor:
    """See :func:`hisparse.ops.pack.pack_pages`."""
    pages = torch.zeros(len(k), fmt.page_bytes, dtype=torch.uint8, device=k.device)
    if not len(k):
        return pages
    if fmt.raw_dtype is not None:
        for x, offset, name in ((k, 0, "K"), (v, fmt.raw_v_offset, "V")):
            _refuse_unless(x.isfinite().amin(-1), x, name)
            size = fmt.heads * fmt.tokens * fmt.head_dim * fmt.raw_dtype.itemsize
            raw = x.transpose(1, 2).to(fmt.raw_dtype).contiguous()
            _refuse_unless(raw.isfinite().amin(-1).transpose(1, 2), x, name)
            pages[:, offset : offset + size] = raw.view(len(k), -1).view(torch.uint8)
        return pages
    assert stats is not None  # checked by the public function
    normal_k = _normalise(k, stats.k_mean, stats.k_scale, stats.runs)
    normal_v = _normalise(v, stats.v_mean, stats.v_scale, None)
    offsets = (fmt.k_nibble_offset, fmt.k_extra_offset, fmt.k_scale_offset)
    _pack(normal_k, k, "K", fmt, fmt.k_bits, offsets, split, peak_threshold, pages)
    offsets = (fmt.v_nibble_offset, fmt.v_extra_offset, fmt.v_scale_offset)
    _pack(normal_v, v, "V", fmt, fmt.v_bits, offsets, "never" if split == "rope" else split, peak_threshold, pages)
    return pages


def _normalise(x: Tensor, mean: Tensor, scale: Tensor, runs: tuple[tuple[int, int, int], ...] | None) -> Tensor:
    """(x - mean) / scale, head-major and permuted: [n, P, H, D] -> float32 [n, H, P, D]."""
    n, tokens, heads, dim = x.shape
    out = torch.empty(n, heads, tokens, dim, dtype=torch.float32, device=x.device)
    torch.sub(x.transpose(1, 2), mean[:, None], out=out) if runs is None else _permuted_sub(x, mean, runs, out)
    inverse = scale.reciprocal()
    return out.mul_((inverse if runs is None else torch.cat([inverse[:, c : c + w] for _, c, w in runs], 1))[:, None])


def _permuted_sub(x: Tensor, mean: Tensor, runs: tuple[tuple[int, int, int], ...], out: Tensor) -> None:
    source = x.transpose(1, 2)
    for place, channel, width in runs:
        here = slice(channel, channel + width)
        torch.sub(source[..., here], mean[:, None, here], out=out[..., place : place + width])


def _pack(
    x: Tensor,
    original: Tensor,
    name: str,
    fmt: PageFormat,
    bits: int,
    offsets: tuple[int, int, int],
    split: str,
    peak_threshold: float,
    pages: Tensor,
) -> None:
    """Quantise `x`, float32 [n, H, P, D], into the nibbles, extra and scales fields of `pages`."""
    n, heads, tokens, dim = x.shape
    groups, half = fmt.groups, dim // 2
    blocks = x.view(n, heads, tokens * 2, groups, fmt.group // 2)
    if groups == 1:
        lo, hi = x.view(n, heads, 1, tokens * dim).aminmax(dim=-1)
    else:
        lo, hi = blocks.amin(-1).amin(2), blocks.amax(-1).amax(2)  # [n, H, G]

    zero, zero_bits = _bf16_down(lo)
    if bits != 5:
        split = "never"
    levels: float | Tensor = float(2**bits - 1)
    is_split: Tensor | None = None
    if split == "rope":
        levels = 63.0
    elif split == "peaks":
        flat = blocks.permute(0, 1, 3, 2, 4).reshape(n * heads * groups, -1)
        is_split = (peak_separation(flat, lo.flatten(), hi.flatten()) > peak_threshold).view(n, heads, groups)
        levels = torch.where(is_split, 63.0, 31.0)
    spread = (hi - zero) / levels
    step, step_bits = _bf16_step(spread, lo == hi)
    finite = zero.isfinite() & step.isfinite()
    if not bool(finite.all()):
        _refuse_unless(finite.all(-1)[:, None].expand(n, tokens, heads), original, name)
    if split == "rope":
        step_bits = step_bits | -0x8000
    elif is_split is not None:
        step_bits = torch.where(is_split, step_bits | -0x8000, step_bits)

    inverse = step.reciprocal()
    if split == "never":
        rates = inverse[:, :, None, :, None]
    else:
        fast = (step * SPLIT_RATIO).reciprocal()
        if is_split is not None:
            fast = torch.where(is_split, fast, inverse)
        rates = torch.stack((inverse, fast), 2).repeat(1, 1, tokens, 1)[..., None]  # [n, H, 2P, G, 1]
    codes = blocks.sub_(zero[:, :, None, :, None]).mul_(rates).add_(0.5).to(torch.uint8)
    codes = codes.view(n, heads, tokens, 2, half)
    a, b = codes[..., 0, :], codes[..., 1, :]

    _field(pages, offsets[0], (heads, tokens, half)).copy_((a & 15) | (b << 4))
    if bits == 5:
        # One formula for both kinds of block: b >> 4 is 0 where b has four bits, a >> 4 is one bit where a has five.
        _field(pages, offsets[1], (heads, tokens, dim // 8)).copy_(_plane((a >> 4) | ((b >> 4) << 1)))
    elif bits == 6:
        _field(pages, offsets[1], (heads, tokens, 2, dim // 8)).copy_(_plane(codes >> 4))
    scales = torch.stack((step_bits, zero_bits), -1).to(torch.int16)  # [n, H, G, 2]
    _field(pages, offsets[2], (heads * groups * 4,)).copy_(scales.view(n, -1).view(torch.uint8))


def _plane(pairs: Tensor) -> Tensor:
    """Two bits a channel pair, uint8 [..., D/2] in 0..3, packed four to a byte: [..., D/8]."""
    quarters = pairs.view(*pairs.shape[:-1], 4, pairs.shape[-1] // 4)
    low = quarters[..., 0, :] | (quarters[..., 1, :] << 2)
    return low | (quarters[..., 2, :] << 4) | (quarters[..., 3, :] << 6)


def _field(pages: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    """A view of one field of every page: uint8 [n, *shape]."""
    size = 1
    for length in shape:
        size *= length
    return pages[:, offset : offset + size].view(-1, *shape)


def _bf16_down(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest bfloat16 <= x, as float32 and as its 16 bits (int32). Adding to the magnitude of negatives rounds them down."""
    bits = x.contiguous().view(torch.int32)
    bits = (bits + ((bits >> 31) & 0xFFFF)) & -0x10000
    return bits.view(torch.float32), bits >> 16


def _bf16_step(x: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest bfloat16 >= x > 0, as float32 and 16 bits (int32); the nearest where a block holds one value only, whose
    top code then falls closest to it."""
    bits = x.clamp_min(_TINY).contiguous().view(torch.int32)
    bits = (bits + 0xFFFF - 0x7FFF * constant.to(torch.int32)) & -0x10000
    return bits.view(torch.float32), bits >> 16


def _refuse_unless(good: Tensor, x: Tensor, name: str) -> None:
    """Raises FormatError naming the first bad value; `good` bool [n, P, H] says which rows are fine."""
    if bool(good.all()):
        return
    bad = ~good[..., None] & ~x.isfinite()
    if not bool(bad.any()):
        page, _, head = (int(i) for i in (~good).nonzero()[0])
        largest = float(x[page, :, head].abs().max())
        raise FormatError(
            f"{name} of page {page}, head {head}: magnitude {largest:g} is beyond the range of the format; "
            "check the model's dtype and the calibration file"
        )
    page, token, head, channel = (int(i) for i in bad.nonzero()[0])
    value = float(x[page, token, head, channel])
    raise FormatError(
        f"{name} of page {page}, token {token}, head {head}, channel {channel} is {value}; only finite values can be packed "
        "(padding rows must be masked out before, and float16 models may overflow: try bfloat16 or float32)"
    )
