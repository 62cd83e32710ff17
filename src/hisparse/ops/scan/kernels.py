"""Kernels that score sketches.

A sketch's bytes are read as 16-bit words, each two codes of four bits and four of two (see :mod:`hisparse.ops.sketch`).
A field masked out of its word, the upper byte shifted down first, is worth ``code * place``, a number below 1024 whose
bits *are* a float16: the subnormal ``code * place * 2**-24``, which the matrix units multiply exactly. So unpacking is
one AND a pair of fields, and everything else - step, place, 2**-24 - is folded into the weights that the query brings
along. What the middle of the codes adds to a score is one number a query, the accumulator's first value.

The columns of an operand are a head's words. Where they are fewer than the 16 that the matrix units take, `HG` heads
share an operand; the weights of a query are zero in the columns of other heads.

Names: p_ pointer, i_ index, n_ count, f field (0, 1 of four bits, 2..5 of two), c column. Logarithms are to base 2.
"""

# ruff: noqa: RUF005
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"

LOG2E = tl.constexpr(1.4426950408889634)
STEP4 = tl.constexpr(0.3352)  # hisparse.ops.sketch.STEP
STEP2 = tl.constexpr(0.9957)
LIMIT = tl.constexpr(60000.0)
"""Largest weight: float16 ends at 65504, and a score made of such weights is beyond all meaning."""
HEADROOM = tl.constexpr(100.0)
"""Scores more than 2**100 times the reference's attention are counted as that much: sums of squares stay finite."""
FARTHEST = tl.constexpr(150.0)

PLACES = (1, 16, 1, 4, 16, 64)
"""What a unit of each field is worth where it lies in its byte."""
_FIELDS = (
    "{ .reg .b32 w; shr.u32 w, $6, 8; "
    + " ".join(
        f"and.b32 ${f}, {'$6' if f < 2 else 'w'}, 0x{(15 if f < 2 else 3) * place * 0x10001:08x};"
        for f, place in enumerate(PLACES)
    )
    + " }"
)
ASM_FIELDS = tl.constexpr(_FIELDS)


if INTERPRET:

    def bound(x: Any) -> int:
        """A scalar as a loop bound: the interpreter's arrays of one element are none for recent versions of numpy."""
        return int(x.handle.data.item())

else:

    @triton.jit
    def bound(x):
        return x


@triton.jit
def _field(word, f: tl.constexpr):
    bits = word & (15 << (4 * f)) if f < 2 else (word >> 8) & (3 << (2 * (f - 2)))
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def fields(words, SIMD: tl.constexpr):
    """The six fields of int16 words, as float16 tiles of the words' shape."""
    if SIMD:
        return tl.inline_asm_elementwise(
            ASM_FIELDS, "=r,=r,=r,=r,=r,=r,r", [words],
            # In place: Triton 3.8 and newer take no tuple of dtypes that a kernel has given a name.
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    w = words.to(tl.int32)
    return _field(w, 0), _field(w, 1), _field(w, 2), _field(w, 3), _field(w, 4), _field(w, 5)


@triton.jit
def weigh_queries(
    p_q, p_basis, p_weight, p_middle, scaling, stride_batch, stride_head, stride_query,
    HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, W: tl.constexpr, HG: tl.constexpr, Q: tl.constexpr,
    KP: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The weights of one field of one head group: p_weight float16 [B, groups, 6, KP, NP], p_middle float32
    [B, groups, 6, NP].

    p_q: query i of head h of sequence b at b * stride_batch + h * stride_head + i * stride_query; Q queries a KV head.
    p_basis: float32 [H, D, C]. Query n of the group is query n % Q of head n // Q.
    """
    i_group = tl.program_id(0)
    i_batch = tl.program_id(1).to(tl.int64)
    f = tl.program_id(2)
    c = tl.arange(0, KP)
    c_head = i_group * HG + c // W
    coordinate = f * W + c % W
    m_c = (c < HG * W) & (c_head < HEADS)
    n = tl.arange(0, NP)
    n_head = i_group * HG + n // Q
    m_n = (n < HG * Q) & (n_head < HEADS)
    p_row = p_q + i_batch * stride_batch + n_head.to(tl.int64) * stride_head + (n % Q).to(tl.int64) * stride_query
    w = tl.zeros((NP, KP), tl.float32)
    for d0 in tl.static_range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        m_d = d < D
        q = tl.load(p_row[:, None] + d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        basis = tl.load(
            p_basis + (c_head * (D * C) + coordinate)[None, :] + d[:, None] * C,
            mask=m_c[None, :] & m_d[:, None],
            other=0.0,
        )
        w = tl.dot(q, basis, w, input_precision="ieee")
    four = f < 2
    place = tl.exp2(tl.where(four, 4.0 * f, 2.0 * f - 4.0))  # what a unit of the field is worth where it lies
    w *= (scaling * LOG2E) * tl.where(four, STEP4, STEP2) / place
    own = m_n[:, None] & m_c[None, :] & (n // Q == 0)[:, None]
    if HG > 1:
        own = m_n[:, None] & m_c[None, :] & ((n // Q)[:, None] == (c // W)[None, :])
    half = tl.where(own, tl.minimum(tl.maximum(w, -LIMIT), LIMIT), 0.0).to(tl.float16)
    at = (i_batch * tl.num_programs(0) + i_group) * 6 + f
    tl.store(p_weight + at * (KP * NP) + c[None, :] * NP + n[:, None], half)
    # From the rounded weights: the codes and their middle then cancel as they should.
    tl.store(p_middle + at * NP + n, tl.sum(half.to(tl.float32), 1) * tl.where(four, 7.5, 1.5) * place)


@triton.jit
def read_weights(p_weight, p_middle, at, KP: tl.constexpr, NP: tl.constexpr):
    """Six float16 tiles [KP, NP] and the accumulator's first value, float32 [NP]."""
    c, n = tl.arange(0, KP), tl.arange(0, NP)
    tiles = ()
    middle = tl.zeros((NP,), tl.float32)
    for f in tl.static_range(6):
        tiles = tiles + (tl.load(p_weight + (at * 6 + f) * (KP * NP) + c[:, None] * NP + n[None, :]),)
        middle += tl.load(p_middle + (at * 6 + f) * NP + n)
    return tiles, middle * -5.9604644775390625e-08  # 2**-24


@triton.jit
def read_words(
    p_token, i_group, HEADS: tl.constexpr, W: tl.constexpr, HG: tl.constexpr, R: tl.constexpr, KP: tl.constexpr
):
    """int16 words [tokens, KP] of one head group; p_token: int16 pointers [tokens] to the tokens' codes of head 0."""
    c = tl.arange(0, KP)
    c_head = i_group * HG + c // W
    at = c_head * (R * W) + c % W
    if HG * W == KP and HEADS % HG == 0:
        return tl.load(p_token[:, None] + at[None, :])
    inside = (c < HG * W) & (c_head < HEADS)
    return tl.load(p_token[:, None] + at[None, :], mask=inside[None, :], other=0)


@triton.jit
def raw_scores(words, weights, first, SIMD: tl.constexpr):
    """float32 [tokens, NP], to be multiplied by the tokens' scales."""
    x = fields(words, SIMD)
    acc = tl.zeros((words.shape[0], first.shape[0]), tl.float32) + first[None, :]
    for f in tl.static_range(6):
        acc = tl.dot(x[f], weights[f], acc)
    return acc


@triton.jit
def decode_scale(byte):
    """2**24 times the root mean square that a scale byte stands for."""
    return tl.exp2(byte.to(tl.float32) * 0.0625 + 16.0)  # (byte - 128) / 16 + 24


@triton.jit
def scan_share(
    p_weight, p_middle, p_codes, p_scales, p_table, p_count, p_value, p_part, n_rows_max, stride_code, stride_scale,
    HEADS: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, W: tl.constexpr, HG: tl.constexpr, GROUPS: tl.constexpr,
    ALL: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SIMD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One share of a sequence's rows, for GROUPS of its ALL head groups. stride_code: 16-bit words from row to row of
    p_codes; stride_scale: bytes from row to row of p_scales.

    Writes p_value bfloat16 [B, ALL, max_rows, HG * Q]: the square root of a row's attention, relative to a score of
    zero; and p_part float32 [B, ALL, NP, shares]: log2 of the sum of the share's attention.

    Attention is summed relative to the largest score of the share's first tile, which saves a running maximum: the
    range of float32 bears scores 2**HEADROOM times higher, and higher ones are clipped to that, which still puts
    their rows first. TOKENS tokens of each row are requested before the first is used.
    """
    BLOCKS: tl.constexpr = ALL // GROUPS
    # Programs of the same rows are neighbours: what one fetches along with its bytes the others find in the L2 cache.
    i_share, i_block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    i_batch = tl.program_id(1).to(tl.int64)
    n_share = tl.num_programs(0) // BLOCKS
    N: tl.constexpr = HG * Q
    count = tl.minimum(tl.load(p_count + i_batch), n_rows_max)
    n_tiles = tl.cdiv(count, ROWS)
    start = (i_share * n_tiles.to(tl.int64) // n_share).to(tl.int32)
    end = ((i_share + 1) * n_tiles.to(tl.int64) // n_share).to(tl.int32)
    p_table += i_batch * n_rows_max
    p_codes = p_codes.to(tl.pointer_type(tl.int16))
    i_group = i_block * GROUPS
    n = tl.arange(0, NP)
    r = tl.arange(0, ROWS)

    # All loads before the first use: the way of an operand to the matrix units holds up whatever comes after it.
    i_row = start * ROWS + r
    m_row = i_row < count
    ids = tl.load(p_table + i_row, mask=m_row, other=0).to(tl.int64)
    weights = ()
    firsts = ()
    totals = ()
    words_0 = ()
    scales_0 = ()
    for g in tl.static_range(GROUPS):
        tiles, first = read_weights(p_weight, p_middle, i_batch * ALL + i_group + g, KP, NP)
        weights = weights + (tiles,)
        firsts = firsts + (first,)
        totals = totals + (tl.zeros((ROWS, NP), tl.float32),)
        words_0 = words_0 + (read_words(p_codes + ids * stride_code, i_group + g, HEADS, W, HG, R, KP),)
        n_head_0 = tl.minimum((i_group + g) * HG + tl.minimum(n // Q, HG - 1), HEADS - 1)
        scales_0 = scales_0 + (tl.load(p_scales + (ids * stride_scale)[:, None] + (n_head_0 * R)[None, :]),)
    references = ()
    for g in tl.static_range(GROUPS):
        s_0 = raw_scores(words_0[g], weights[g], firsts[g], SIMD) * decode_scale(scales_0[g])
        top_0 = tl.max(tl.where(m_row[:, None], s_0, -FARTHEST), 0)
        references = references + (tl.minimum(tl.maximum(top_0, -FARTHEST), FARTHEST),)

    for i_tile in tl.range(bound(start), bound(end), num_stages=STAGES):
        i_row = i_tile * ROWS + r
        m_row = i_row < count
        ids = tl.load(p_table + i_row, mask=m_row, other=0).to(tl.int64)
        sums = ()
        for _ in tl.static_range(GROUPS):
            sums = sums + (tl.zeros((ROWS, NP), tl.float32),)
        for j0 in tl.static_range(0, R, TOKENS):
            loaded = ()
            scales = ()
            for j in tl.static_range(j0, j0 + TOKENS):
                for g in tl.static_range(GROUPS):
                    loaded = loaded + (
                        read_words(p_codes + ids * stride_code + j * W, i_group + g, HEADS, W, HG, R, KP),
                    )
                    n_head = tl.minimum((i_group + g) * HG + tl.minimum(n // Q, HG - 1), HEADS - 1)
                    scales = scales + (tl.load(p_scales + (ids * stride_scale + j)[:, None] + (n_head * R)[None, :]),)
            new = ()
            for g in tl.static_range(GROUPS):
                total = sums[g]
                for j in tl.static_range(TOKENS):
                    acc = raw_scores(loaded[j * GROUPS + g], weights[g], firsts[g], SIMD)
                    scale = decode_scale(scales[j * GROUPS + g])
                    total += tl.exp2(tl.minimum(acc * scale - references[g][None, :], HEADROOM))
                new = new + (total,)
            sums = new
        grown = ()
        for g in tl.static_range(GROUPS):
            total = tl.where(m_row[:, None], sums[g], 0.0)
            grown = grown + (totals[g] + total,)
            value = (tl.sqrt(total) * tl.exp2(0.5 * references[g])[None, :]).to(tl.bfloat16)
            p_row = p_value + ((i_batch * ALL + i_group + g) * n_rows_max + i_row) * N
            tl.store(p_row[:, None] + n[None, :], value, mask=m_row[:, None] & (n < N)[None, :])
        totals = grown

    for g in tl.static_range(GROUPS):
        log = references[g] + tl.log2(tl.sum(totals[g], 0))  # -inf for a share without rows
        tl.store(p_part + ((i_batch * ALL + i_group + g) * NP + n) * n_share + i_share, log)


@triton.jit
def combine_shares(p_part, p_factor, p_clear, n_share, n_clear, N: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr,
                   CLEAR: tl.constexpr):  # fmt: skip
    """One query head: p_factor float32 [B, ALL, N] = total attention ** -1/4, the power in two steps so that neither
    overflows. Also clears `n_clear` integers at p_clear, this program's share of them."""
    i_group, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    p_own = p_part + (i_group * NP + i_n) * n_share
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    for at in range(0, bound(n_share), BLOCK):
        peak = tl.maximum(peak, tl.load(p_own + at + i, mask=at + i < n_share, other=float("-inf")))
    top = tl.max(peak, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, bound(n_share), BLOCK):
        total += tl.exp2(tl.load(p_own + at + i, mask=at + i < n_share, other=float("-inf")) - top)
    tl.store(p_factor + i_group * N + i_n, tl.exp2(-0.25 * (top + tl.log2(tl.sum(total, 0)))))
    if CLEAR > 0:
        each = tl.cdiv(n_clear, tl.num_programs(0) * tl.num_programs(1))
        begin = (i_group.to(tl.int32) * tl.num_programs(1) + i_n) * each
        z = tl.arange(0, CLEAR)
        for at in range(0, bound(each), CLEAR):
            o = at + z
            tl.store(p_clear + begin + o, tl.zeros((CLEAR,), tl.int32), mask=(o < each) & (begin + o < n_clear))


@triton.jit
def find_bin(key, base, BINS: tl.constexpr, SHIFT: tl.constexpr):
    """Bin of a worth's bits: its first digits relative to those of the lowest bin, `base`."""
    return tl.minimum(tl.maximum((key >> SHIFT) - base, 0), BINS - 1)


@triton.jit
def count_bins(worth, seen, base, ROWS: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr):
    """Histogram int32 [BINS] of the worth of the rows `seen`."""
    key = worth.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    counts = tl.histogram(tl.where(seen, find_bin(key, base, BINS, SHIFT), 0), BINS)
    return counts - tl.where(tl.arange(0, BINS) == 0, ROWS - tl.sum(seen.to(tl.int32), 0), 0)


@triton.jit
def sum_heads(
    p_value, p_factor, p_count, p_worth, p_histogram, n_rows_max, base, n_heads,
    ALL: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """p_worth float32 [B, max_rows] from the values of n_heads query heads; where BINS > 0 also their histogram, int32
    [B, BINS + 2]. The last group may have room for more heads than there are.

    TILES tiles of ROWS rows a program, counted together: few programs add to the bins in memory, where they queue up.
    """
    i_batch = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(p_count + i_batch), n_rows_max)
    n = tl.arange(0, NP)
    if BINS > 0:
        counts = tl.zeros((BINS,), tl.int32)
    for i_tile in range(TILES):
        i_row = (tl.program_id(0) * TILES + i_tile) * ROWS + tl.arange(0, ROWS)
        m_row = i_row < count
        worth = tl.zeros((ROWS,), tl.float32)
        for g in tl.static_range(ALL):
            i_group = i_batch * ALL + g
            there = (n < N) & (g * N + n < n_heads)
            factor = tl.load(p_factor + i_group * N + n, mask=there, other=0.0)
            p_row = p_value + (i_group * n_rows_max + i_row) * N
            seen = m_row[:, None] & there[None, :]
            value = tl.load(p_row[:, None] + n[None, :], mask=seen, other=0.0).to(tl.float32)
            worth += tl.sum(value * factor[None, :] * factor[None, :], 1)
        if BINS > 0:
            counts += count_bins(worth, m_row, base, ROWS, BINS, SHIFT)
        to = p_worth + i_batch * n_rows_max + i_row
        tl.store(to, tl.where(m_row, worth, float("-inf")), mask=i_row < n_rows_max)
    if BINS > 0:
        bins = tl.arange(0, BINS)
        tl.atomic_add(p_histogram + i_batch * (BINS + 2) + bins, counts, mask=counts > 0, sem="relaxed")
