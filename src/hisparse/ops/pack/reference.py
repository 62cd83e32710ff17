"""Packing in plain torch, vectorised over pages, heads and groups; runs on CPU and CUDA tensors.

Per block: zero = min rounded down to bfloat16, step = (max - zero) / levels rounded up to bfloat16, so the codes cover
the range and every value lies within half a step of its code; code = floor((x - zero) * (1 / step) + 0.5) in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.vtq.format import SPLIT_RATIO, Fields, PageFormat
from hisparse.vtq.peaks import peak_separation
from hisparse.vtq.stats import ChannelStats, Runs, permute_channels

CHUNK_VALUES = 1 << 18
_TINY = 2.0**-126  # smallest step: a subnormal one would have no finite inverse


def pack_pages(
    k: Tensor,
    v: Tensor,
    stats: ChannelStats | None,
    fmt: PageFormat,
    split: str,
    peak_threshold: float,
    faults: Tensor | None = None,
) -> Tensor:
    """See :func:`hisparse.ops.pack.pack_pages`. Bad values raise at once, with `faults` too."""
    pages = torch.zeros(len(k), fmt.page_bytes, dtype=torch.uint8, device=k.device)
    if not len(k):
        return pages
    if fmt.raw_dtype is not None:
        for x, offset, name in ((k, 0, "K"), (v, fmt.raw_v_offset, "V")):
            size = fmt.heads * fmt.tokens * fmt.head_dim * fmt.raw_dtype.itemsize
            raw = x.transpose(1, 2).to(fmt.raw_dtype).contiguous()
            finite = raw.isfinite().all(-1)
            if not bool(finite.all()):
                _refuse(finite.transpose(1, 2), x, name, 0)
            pages[:, offset : offset + size] = raw.view(len(k), -1).view(torch.uint8)
        return pages
    assert stats is not None  # checked by the public function
    # On CPU a chunk's float32 intermediates stay in the cache; on a GPU one launch for all pages is best.
    chunk = len(k) if k.is_cuda else max(1, CHUNK_VALUES // k[0].numel())
    tensors = (
        ("K", k, stats.k_mean, stats.k_scale, stats.runs, fmt.k, split),
        ("V", v, stats.v_mean, stats.v_scale, None, fmt.v, "never" if split == "rope" else split),
    )
    for start in range(0, len(k), chunk):
        here = slice(start, start + chunk)
        for name, x, mean, scale, runs, field, rule in tensors:
            normal = _normalise(x[here], mean, scale, runs)
            finite = _quantise(normal, fmt, field, rule, peak_threshold, pages[here])
            if not bool(finite.all()):
                _refuse(finite.all(-1)[:, None].expand(-1, fmt.tokens, -1), x, name, start)
    return pages


def in_torch(fmt: PageFormat, split: str) -> bool:
    """True for pages that no kernel packs."""
    peaks = split == "peaks" and 5 in (fmt.k_bits, fmt.v_bits)
    return fmt.raw_dtype is not None or peaks or fmt.groups not in (1, 2, 4)


def pack_tokens(
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    stats: ChannelStats | None,
    fmt: PageFormat,
    split: str,
    peak_threshold: float,
    faults: Tensor,
    out: Tensor,
    places: Tensor,
    pack: Callable[..., Tensor] = pack_pages,
) -> None:
    """See :func:`hisparse.ops.pack.pack_tokens`. pack: the twin that packs what has been gathered."""
    plain = in_torch(fmt, split)
    if plain and k.is_meta:
        return  # no kernel to compile, no values to look at
    k, v = k[tokens], v[tokens]
    if plain or pack is pack_pages:  # a kernel counts by itself
        bad = int(sum((~x.isfinite()).flatten(1).any(1).sum() for x in (k, v)))
        if bad:
            faults += bad
            k, v = k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)
    out[places] = pack(k, v, stats, fmt, split, peak_threshold, faults)


def _normalise(x: Tensor, mean: Tensor, scale: Tensor, runs: Runs | None) -> Tensor:
    """(x - mean) * (1 / scale), head-major and permuted: [n, P, H, D] -> float32 [n, H, P, D]."""
    n, tokens, heads, dim = x.shape
    out = torch.empty(n, heads, tokens, dim, dtype=torch.float32, device=x.device)
    source, mean, rate = x.transpose(1, 2), mean[:, None], scale.reciprocal()[:, None]
    for place, channel, width in ((0, 0, dim),) if runs is None else runs:
        torch.sub(
            source[..., channel : channel + width],
            mean[..., channel : channel + width],
            out=out[..., place : place + width],
        )
    return out.mul_(rate if runs is None else permute_channels(rate, runs))


def _quantise(x: Tensor, fmt: PageFormat, field: Fields, split: str, peak_threshold: float, pages: Tensor) -> Tensor:
    """Write the codes and scales of `x`, float32 [n, H, P, D], into their fields of `pages`.

    Returns bool [n, H, G]: false where a block holds inf or NaN or exceeds the range of the format (its bytes mean
    nothing).
    """
    n, heads, tokens, dim = x.shape
    groups, half, eighth = fmt.groups, dim // 2, dim // 8
    blocks = x.view(n, heads, tokens, 2, groups, fmt.group // 2)
    # amin and amax, not aminmax: the fused form is several times slower on CPU
    if groups == 1:
        flat = x.view(n, heads, 1, tokens * dim)
        lo, hi = flat.amin(-1), flat.amax(-1)  # [n, H, G]
    else:
        lo, hi = blocks.amin(-1).amin((2, 3)), blocks.amax(-1).amax((2, 3))

    zero, zero_bits = _bf16_down(lo)
    if field.bits != 5:
        split = "never"
    levels: float | Tensor = float(2**field.bits - 1)
    is_split: Tensor | None = None
    if split == "rope":
        levels = 63.0
    elif split == "peaks":
        flat = blocks.permute(0, 1, 4, 2, 3, 5).reshape(n * heads * groups, -1)
        is_split = (peak_separation(flat, lo.flatten(), hi.flatten()) > peak_threshold).view(n, heads, groups)
        levels = torch.where(is_split, 63.0, 31.0)
    step, step_bits = _bf16_step((hi - zero) / levels, lo == hi)
    finite = zero.isfinite() & step.isfinite()
    slow = step.reciprocal()
    fast = slow
    if split == "rope":
        step_bits = step_bits | -0x8000
        fast = (step * SPLIT_RATIO).reciprocal()
    elif is_split is not None:
        step_bits = torch.where(is_split, step_bits | -0x8000, step_bits)
        fast = torch.where(is_split, (step * SPLIT_RATIO).reciprocal(), slow)

    zero = zero[:, :, None, :, None]
    a, b = (
        (blocks[:, :, :, i] - zero).mul_(rate[:, :, None, :, None]).add_(0.5).to(torch.uint8).view(n, -1)
        for i, rate in enumerate((slow, fast))
    )  # [n, H * P * D/2]
    rows = heads * tokens
    _field(pages, field.nibbles, rows * half).copy_((b << 4).bitwise_or_(a & 15))
    if field.bits == 5:
        # One formula for both kinds of block: b >> 4 is 0 where b has four bits, a >> 4 is one bit where a has five.
        pairs = (b >> 4).bitwise_left_shift_(1).bitwise_or_(a >> 4)
        _field(pages, field.extra, rows * eighth).copy_(_plane(pairs, eighth).view(n, -1))
    elif field.bits == 6:
        extra = _field(pages, field.extra, rows * 2 * eighth).view(n, rows, 2, eighth)
        extra[:, :, 0] = _plane(a >> 4, eighth)
        extra[:, :, 1] = _plane(b >> 4, eighth)
    scales = torch.stack((step_bits, zero_bits), -1).to(torch.int16)  # [n, H, G, 2]
    _field(pages, field.scales, heads * groups * 4).copy_(scales.view(n, -1).view(torch.uint8))
    return finite


def _plane(pairs: Tensor, eighth: int) -> Tensor:
    """Two bits a channel pair, uint8 [n, rows * D/2] in 0..3, packed four to a byte: [n, rows, D/8]."""
    quarters = pairs.view(len(pairs), -1, 4, eighth)
    plane = quarters[:, :, 3] << 2
    for s in (2, 1, 0):
        plane |= quarters[:, :, s]
        if s:
            plane <<= 2
    return plane


def _field(pages: Tensor, offset: int, size: int) -> Tensor:
    """A view of one field of every page: uint8 [n, size]."""
    return pages[:, offset : offset + size]


def _bf16_down(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest bfloat16 <= x, as float32 and as its 16 bits (int32): adds to the magnitude of negatives only."""
    bits = x.contiguous().view(torch.int32)
    bits = (bits + ((bits >> 31) & 0xFFFF)) & -0x10000
    return bits.view(torch.float32), bits >> 16


def _bf16_step(x: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest bfloat16 >= x > 0, as float32 and 16 bits (int32).

    Where a block holds one value only it is the nearest one: the top code then falls closest to that value.
    """
    bits = x.clamp_min(_TINY).contiguous().view(torch.int32)
    bits = (bits + 0xFFFF - 0x7FFF * constant.to(torch.int32)) & -0x10000
    return bits.view(torch.float32), bits >> 16


def _refuse(good: Tensor, x: Tensor, name: str, start: int) -> NoReturn:
    """Raise FormatError naming the first bad value; `good` bool [m, P, H] marks the fine rows from page `start` on."""
    rows = x[start : start + len(good)]
    bad = (~rows.isfinite()).nonzero()
    if len(bad):
        page, token, head, channel = (int(i) for i in bad[0])
        raise FormatError(
            f"{name} of page {start + page}, token {token}, head {head}, channel {channel} is "
            f"{float(rows[page, token, head, channel])}; only finite values can be packed (mask padding rows out "
            "before; a float16 model may have overflowed: try bfloat16 or float32)"
        )
    page, _, head = (int(i) for i in (~good).nonzero()[0])
    raise FormatError(
        f"{name} of page {start + page}, head {head}: magnitude {float(rows[page, :, head].abs().max()):g} is beyond "
        "the range of the format; check the model's dtype and the calibration file"
    )
