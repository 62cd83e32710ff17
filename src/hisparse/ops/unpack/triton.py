"""Unpacking with Triton: one program a head of a page, every byte read once and every value written once.

x = code * (step * scale) + (zero * scale + mean), as the reference computes it. Raw pages are left to the reference.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.ops.unpack import reference
from hisparse.vtq.format import Fields, PageFormat
from hisparse.vtq.stats import ChannelStats

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
SPLIT_RATIO = tl.constexpr(4.2)


@triton.jit
def _put(p_token, p_mean, p_scale, channel, seen, seen_stats, code, step, zero):
    mean = tl.load(p_mean + channel, mask=seen_stats, other=0.0)
    scale = tl.load(p_scale + channel, mask=seen_stats, other=0.0)
    value = code.to(tl.float32) * (step * scale)[None, :, :] + (zero * scale + mean)[None, :, :]
    tl.store(p_token[:, None, None] + channel[None, :, :], value.to(p_token.dtype.element_ty), mask=seen)


@triton.jit
def _unpack(
    p_pages, p_out, p_mean, p_scale, p_order, n_pages,
    D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, EP: tl.constexpr, GROUP: tl.constexpr,
    PAGE_BYTES: tl.constexpr, BITS: tl.constexpr, NIBBLES: tl.constexpr, EXTRA: tl.constexpr, SCALES: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    i_page, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    E: tl.constexpr = D // 8
    HALF: tl.constexpr = D // 2
    G: tl.constexpr = D // GROUP
    p = tl.arange(0, PP)
    s = tl.arange(0, 4)
    e = tl.arange(0, EP)
    j = s[:, None] * E + e[None, :]
    m_j = (s[:, None] >= 0) & (e[None, :] < E)
    seen = (p < P)[:, None, None] & m_j[None, :, :]
    m_e = (p < P)[:, None] & (e < E)[None, :]
    p_page = p_pages + i_page * PAGE_BYTES
    row = i_head * P + p
    byte = tl.load(p_page + NIBBLES + (row * HALF)[:, None, None] + j[None, :, :], mask=seen, other=0).to(tl.int32)
    at = p_page + SCALES + (i_head * G + j // (GROUP // 2)) * 4
    word = tl.load(at.to(tl.pointer_type(tl.int32)), mask=m_j, other=0)
    step = ((word & 0x7FFF) << 16).to(tl.float32, bitcast=True)
    zero = (word & -0x10000).to(tl.float32, bitcast=True)
    split = (word & 0x8000) != 0
    step_b = tl.where(split, step * SPLIT_RATIO, step)
    a, b = byte & 15, byte >> 4
    p_extra = p_page + EXTRA + (row * ((BITS - 4) * E))[:, None] + e[None, :]
    shift = 2 * s[None, :, None]
    if BITS == 5:
        x = (tl.load(p_extra, mask=m_e, other=0).to(tl.int32)[:, None, :] >> shift) & 3
        is_split = split[None, :, :]
        a |= tl.where(is_split, x, x & 1) << 4
        b |= tl.where(is_split, 0, x >> 1) << 4
    if BITS == 6:
        a |= ((tl.load(p_extra, mask=m_e, other=0).to(tl.int32)[:, None, :] >> shift) & 3) << 4
        b |= ((tl.load(p_extra + E, mask=m_e, other=0).to(tl.int32)[:, None, :] >> shift) & 3) << 4
    if ORDERED:
        slow = tl.load(p_order + j, mask=m_j, other=0).to(tl.int32)
        fast = tl.load(p_order + HALF + j, mask=m_j, other=0).to(tl.int32)
    else:
        slow, fast = j, j + HALF
    p_token = p_out + ((i_head * n_pages + i_page) * P + p) * D
    _put(p_token, p_mean + i_head * D, p_scale + i_head * D, slow, seen, m_j, a, step, zero)
    _put(p_token, p_mean + i_head * D, p_scale + i_head * D, fast, seen, m_j, b, step_b, zero)


def unpack_pages(
    pages: Tensor, stats: ChannelStats | None, fmt: PageFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.ops.unpack.unpack_pages`."""
    if fmt.raw_dtype is not None or stats is None or dtype == torch.float64:
        return reference.unpack_pages(pages, stats, fmt, dtype)
    pages = pages.contiguous()
    k = _tensor(pages, fmt, fmt.k, stats.k_mean, stats.k_scale, stats.order, True, dtype)
    v = _tensor(pages, fmt, fmt.v, stats.v_mean, stats.v_scale, stats.order, False, dtype)
    return k, v


def _tensor(
    pages: Tensor,
    fmt: PageFormat,
    field: Fields,
    mean: Tensor,
    scale: Tensor,
    order: Tensor,
    ordered: bool,
    dtype: torch.dtype,
) -> Tensor:
    n = len(pages)
    out = torch.empty(fmt.heads, n, fmt.tokens, fmt.head_dim, dtype=dtype, device=pages.device)
    if n:
        options = {} if INTERPRET else {"num_warps": 1}
        _unpack[(n, fmt.heads)](
            pages, out, mean, scale, order, n, fmt.head_dim, fmt.tokens, triton.next_power_of_2(fmt.tokens),
            triton.next_power_of_2(fmt.head_dim // 8), fmt.group, fmt.page_bytes, field.bits, field.nibbles,
            field.extra,
            field.scales, ordered, **options,
        )  # fmt: skip
    return out.permute(1, 2, 0, 3)
