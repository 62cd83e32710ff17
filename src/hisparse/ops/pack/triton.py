"""Packing with Triton: normalise, decide, quantise and pack K and V in one launch, the input read once.

A program takes one head of a few pages; its block stays in registers from the load to the codes. The arithmetic is that
of the reference, step by step and rounded alike (divisions and reciprocals to nearest, no fused multiply-adds), so
the bytes are those of the reference on a CPU. On CUDA, torch itself divides by a number as it multiplies with the
number's reciprocal: its steps may then differ in the last bit of float32, before they are rounded up to bfloat16.

Raw pages, the peak test and heads of other than one, two or four channel groups are left to the reference.
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

from hisparse.ops.pack import reference
from hisparse.vtq.format import Fields, PageFormat
from hisparse.vtq.stats import ChannelStats

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
PAGES_EACH = 4
SPLIT_RATIO = tl.constexpr(4.2)
TINY = tl.constexpr(1.1754943508222875e-38)  # 2**-126, the smallest step


if INTERPRET:

    @triton.jit
    def _divide(x, y):
        return x / y

else:

    @triton.jit
    def _divide(x, y):
        return tl.math.div_rn(x, y)


@triton.jit
def _lower(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _upper(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _channels(
    p_order, p_mean, p_rate, i_head, first: tl.constexpr, D: tl.constexpr, EP: tl.constexpr, RUN: tl.constexpr
):
    """Of the stored channels first .. first + D/2 - 1, by [4, E]: where they lie in the input, their means, their
    rates."""
    E: tl.constexpr = D // 8
    s, e = tl.arange(0, 4)[:, None], tl.arange(0, EP)[None, :]
    inside = (s >= 0) & (e < E)
    channel = first + s * E + e
    if RUN > 0:  # K: runs of RUN adjacent channels
        channel = tl.load(p_order + channel, mask=inside, other=0).to(tl.int32)
        channel = tl.max_contiguous(tl.multiple_of(channel, (1, RUN)), (1, RUN))
    at = i_head * D + channel
    return channel, tl.load(p_mean + at, mask=inside, other=0.0), tl.load(p_rate + at, mask=inside, other=0.0)


@triton.jit
def _normal(p_token, channels, seen):
    """Normalised values float32 [P, 4, E]."""
    x = tl.load(p_token[:, None, None] + channels[0][None, :, :], mask=seen, other=0.0, eviction_policy="evict_first")
    return (x.to(tl.float32) - channels[1][None, :, :]) * channels[2][None, :, :]


@triton.jit
def _pack_one(
    p_x, slow, fast, p_page, i_head, stride_token,
    D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, EP: tl.constexpr, GROUP: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """One head of one page of K or V, F as in `_pack`. Returns how many of its blocks cannot be stored."""
    BITS: tl.constexpr = F[0]
    SPLIT: tl.constexpr = F[1]
    NIBBLES: tl.constexpr = F[2]
    EXTRA: tl.constexpr = F[3]
    SCALES: tl.constexpr = F[4]
    E: tl.constexpr = D // 8
    HALF: tl.constexpr = D // 2
    G: tl.constexpr = D // GROUP
    p = tl.arange(0, PP)
    s = tl.arange(0, 4)
    e = tl.arange(0, EP)
    j = s[:, None] * E + e[None, :]  # channel pair
    seen = (p < P)[:, None, None] & (e < E)[None, None, :] & (s >= 0)[None, :, None]
    p_token = p_x + p.to(tl.int64) * stride_token
    a = _normal(p_token, slow, seen)
    b = _normal(p_token, fast, seen)

    lo, hi = _lower(a, b), _upper(a, b)
    if P != PP or E != EP:
        lo, hi = tl.where(seen, lo, float("inf")), tl.where(seen, hi, float("-inf"))
    lo, hi = tl.reduce(tl.reduce(lo, 2, _lower), 0, _lower), tl.reduce(tl.reduce(hi, 2, _upper), 0, _upper)  # [4]
    # A group is one, two or all of the four stretches of channel pairs; each stretch gets its group's limits.
    group_lo, group_hi = lo, hi
    if G < 4:
        for g in tl.static_range(G):
            mine = s // (4 // G) == g
            group_lo = tl.where(mine, tl.reduce(tl.where(mine, lo, float("inf")), 0, _lower), group_lo)
            group_hi = tl.where(mine, tl.reduce(tl.where(mine, hi, float("-inf")), 0, _upper), group_hi)
    lo, hi = group_lo, group_hi
    bits = lo.to(tl.int32, bitcast=True)
    bits = (bits + ((bits >> 31) & 0xFFFF)) & -0x10000
    zero = bits.to(tl.float32, bitcast=True)
    levels = 63.0 if SPLIT else float(2**BITS - 1)
    step = tl.maximum(_divide(hi - zero, levels), TINY).to(tl.int32, bitcast=True)
    step = (step + 0xFFFF - tl.where(lo == hi, 0x7FFF, 0)) & -0x10000
    # The difference of the limits is not finite where one of the values is not: NaN is never smaller.
    fine = ((bits & 0x7F800000) != 0x7F800000) & ((step & 0x7F800000) != 0x7F800000) & (hi - lo < float("inf"))
    bad = 4 - tl.sum(fine.to(tl.int32), 0)
    width = step.to(tl.float32, bitcast=True)
    word = bits | ((step >> 16) & 0xFFFF)
    rate_a = _divide(1.0, width)
    rate_b = rate_a
    if SPLIT:
        word |= 0x8000
        rate_b = _divide(1.0, width * SPLIT_RATIO)
    p_scale = (p_page + SCALES + (i_head * G + s // (4 // G)) * 4).to(tl.pointer_type(tl.int32))
    tl.store(p_scale, word, mask=s % (4 // G) == 0)
    zero, rate_a, rate_b = zero[None, :, None], rate_a[None, :, None], rate_b[None, :, None]
    code_a = ((a - zero) * rate_a + 0.5).to(tl.int32)
    code_b = ((b - zero) * rate_b + 0.5).to(tl.int32)
    row = i_head * P + p
    nibbles = (code_a & 15) | ((code_b & 15) << 4)
    tl.store(p_page + NIBBLES + (row * HALF)[:, None, None] + j[None, :, :], nibbles.to(tl.uint8), mask=seen)
    shift = 2 * s[None, :, None]
    m_e = (p < P)[:, None] & (e < E)[None, :]
    p_extra = p_page + EXTRA + (row * ((BITS - 4) * E))[:, None] + e[None, :]
    if BITS == 5:
        pair = ((code_a >> 4) | ((code_b >> 4) << 1)) & 3
        tl.store(p_extra, tl.sum(pair << shift, 1).to(tl.uint8), mask=m_e)
    if BITS == 6:
        tl.store(p_extra, tl.sum(((code_a >> 4) & 3) << shift, 1).to(tl.uint8), mask=m_e)
        tl.store(p_extra + E, tl.sum(((code_b >> 4) & 3) << shift, 1).to(tl.uint8), mask=m_e)
    return bad


@triton.jit
def _pack(
    p_k, p_v, p_k_mean, p_k_rate, p_v_mean, p_v_rate, p_order, p_pages, p_bad, n_pages,
    k_page, k_token, k_head, v_page, v_token, v_head,
    D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, EP: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    PAGE_BYTES: tl.constexpr, KF: tl.constexpr, VF: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """EACH pages of one head. KF, VF: (bits, split, offsets of nibbles, extra, scales)."""
    i_head = tl.program_id(1)
    k_slow = _channels(p_order, p_k_mean, p_k_rate, i_head, 0, D, EP, RUN)
    k_fast = _channels(p_order, p_k_mean, p_k_rate, i_head, D // 2, D, EP, RUN)
    v_slow = _channels(p_order, p_v_mean, p_v_rate, i_head, 0, D, EP, 0)
    v_fast = _channels(p_order, p_v_mean, p_v_rate, i_head, D // 2, D, EP, 0)
    for i in range(EACH):
        i_page = tl.program_id(0).to(tl.int64) * EACH + i
        if i_page < n_pages:
            p_page = p_pages + i_page * PAGE_BYTES
            p_k_page = p_k + i_page * k_page + i_head.to(tl.int64) * k_head
            p_v_page = p_v + i_page * v_page + i_head.to(tl.int64) * v_head
            bad = _pack_one(p_k_page, k_slow, k_fast, p_page, i_head, k_token, D, P, PP, EP, GROUP, KF)
            bad += _pack_one(p_v_page, v_slow, v_fast, p_page, i_head, v_token, D, P, PP, EP, GROUP, VF)
            if bad > 0:
                tl.atomic_add(p_bad, 1, sem="relaxed")


def _field(field: Fields, split: bool) -> tuple[int, int, int, int, int]:
    return field.bits, int(split and field.bits == 5), field.nibbles, field.extra, field.scales


def has_padding(fmt: PageFormat) -> bool:
    """True where fields do not fill the page: the bytes between them are zero."""
    rows, scales = fmt.heads * fmt.tokens, fmt.heads * fmt.groups * 4
    used = rows * (2 * fmt.nibble_width + fmt.k_extra_width + fmt.v_extra_width) + 2 * scales
    return used != fmt.page_bytes


def pack_pages(
    k: Tensor,
    v: Tensor,
    stats: ChannelStats | None,
    fmt: PageFormat,
    split: str,
    peak_threshold: float,
    faults: Tensor | None = None,
    each: int = PAGES_EACH,
    warps: int = 1,
) -> Tensor:
    """See :func:`hisparse.ops.pack.pack_pages`. While a CUDA graph is captured bad values are not looked for."""
    if reference.in_torch(fmt, split) or stats is None or not len(k):
        return reference.pack_pages(k, v, stats, fmt, split, peak_threshold)
    k = k if k.stride(3) == 1 else k.contiguous()
    v = v if v.stride(3) == 1 else v.contiguous()
    make = torch.zeros if has_padding(fmt) else torch.empty
    pages = make(len(k), fmt.page_bytes, dtype=torch.uint8, device=k.device)
    bad = torch.zeros(1, dtype=torch.int32, device=k.device) if faults is None else faults
    strides = (*k.stride()[:3], *v.stride()[:3])
    options = {} if INTERPRET else {"num_warps": warps, "enable_fp_fusion": False}
    run = math.gcd(8, *(number for piece in stats.runs for number in piece), fmt.head_dim // 8)
    _pack[(-(-len(k) // each), fmt.heads)](
        k, v, stats.k_mean, stats.k_scale.reciprocal(), stats.v_mean, stats.v_scale.reciprocal(), stats.order, pages,
        bad,
        len(k), *strides, fmt.head_dim, fmt.tokens, triton.next_power_of_2(fmt.tokens),
        triton.next_power_of_2(fmt.head_dim // 8), fmt.group, run, fmt.page_bytes, _field(fmt.k, split == "rope"),
        _field(fmt.v, False), each, **options,
    )  # fmt: skip
    capturing = k.is_cuda and torch.cuda.is_current_stream_capturing()
    if faults is None and not capturing and bool(bad):
        return reference.pack_pages(k, v, stats, fmt, split, peak_threshold)  # which says what is wrong, and where
    return pages


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
) -> None:
    """See :func:`hisparse.ops.pack.pack_tokens`: gathered, packed and put in their places one after the other."""
    reference.pack_tokens(k, v, tokens, stats, fmt, split, peak_threshold, faults, out, places, pack_pages)
