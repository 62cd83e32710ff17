"""Unpacking with Triton: one program a head of a page, every byte read once and every value written once.

x = code * (step * scale) + (zero * scale + mean), as the reference computes it. Raw pages are left to the reference.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import math
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.ops.unpack import reference
from hisparse.vtq.format import PageFormat
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
    p_pages, p_ids, p_out, p_mean, p_scale, p_order, head_stride, token_stride,
    D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, EP: tl.constexpr, GROUP: tl.constexpr,
    PAGE_BYTES: tl.constexpr, BITS: tl.constexpr, NIBBLES: tl.constexpr, EXTRA: tl.constexpr, SCALES: tl.constexpr,
    RUN: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """One head of one page of K or V. RUN: 0 for V; of K, how many channels are adjacent wherever they are stored."""
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
    if IDS:  # noqa: SIM108 - decided when the kernel is compiled
        p_page = p_pages + tl.load(p_ids + i_page).to(tl.int64) * PAGE_BYTES
    else:
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
    if RUN > 0:
        slow = tl.load(p_order + j, mask=m_j, other=0).to(tl.int32)
        fast = tl.load(p_order + HALF + j, mask=m_j, other=0).to(tl.int32)
        slow = tl.max_contiguous(tl.multiple_of(slow, (1, RUN)), (1, RUN))
        fast = tl.max_contiguous(tl.multiple_of(fast, (1, RUN)), (1, RUN))
    else:
        slow, fast = j, j + HALF
    p_token = p_out + i_head.to(tl.int64) * head_stride + (i_page * P + p) * token_stride
    _put(p_token, p_mean + i_head * D, p_scale + i_head * D, slow, seen, m_j, a, step, zero)
    _put(p_token, p_mean + i_head * D, p_scale + i_head * D, fast, seen, m_j, b, step_b, zero)


def unpack_pages(
    pages: Tensor, stats: ChannelStats | None, fmt: PageFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.ops.unpack.unpack_pages`."""
    if fmt.raw_dtype is not None or stats is None or dtype == torch.float64:
        return reference.unpack_pages(pages, stats, fmt, dtype)
    shape = (fmt.heads, len(pages) * fmt.tokens, fmt.head_dim)
    k = torch.empty(shape, dtype=dtype, device=pages.device)
    v = torch.empty_like(k)
    unpack_into(pages, stats, fmt, k, v, None)
    view = (fmt.heads, len(pages), fmt.tokens, fmt.head_dim)
    return k.view(view).permute(1, 2, 0, 3), v.view(view).permute(1, 2, 0, 3)


def unpack_into(
    pages: Tensor, stats: ChannelStats | None, fmt: PageFormat, k: Tensor, v: Tensor, ids: Tensor | None
) -> None:
    """See :func:`hisparse.ops.unpack.unpack_into`."""
    if fmt.raw_dtype is not None or stats is None or k.dtype == torch.float64 or k.stride(2) != 1:
        reference.unpack_into(pages, stats, fmt, k, v, ids)
        return
    count = len(pages) if ids is None else len(ids)
    if not count:
        return
    pages, ids = pages.contiguous(), None if ids is None else ids.contiguous()
    run = math.gcd(8, *(number for piece in stats.runs for number in piece), fmt.head_dim // 8)
    options = {} if INTERPRET else {"num_warps": 1}
    fields = (
        (k, fmt.k, stats.k_mean, stats.k_scale, run),
        (v, fmt.v, stats.v_mean, stats.v_scale, 0),
    )
    for out, field, mean, scale, runs in fields:
        _unpack[(count, fmt.heads)](
            pages, ids, out, mean, scale, stats.order, out.stride(0), out.stride(1), fmt.head_dim, fmt.tokens,
            triton.next_power_of_2(fmt.tokens), triton.next_power_of_2(fmt.head_dim // 8), fmt.group, fmt.page_bytes,
            field.bits, field.nibbles, field.extra, field.scales, runs, ids is not None, **options,
        )  # fmt: skip
