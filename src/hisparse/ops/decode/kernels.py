"""Kernels of decode attention: one share of a sequence a program, then the shares combined.

Everything below works on transposed scores, [tokens, queries]: the matrix units take tokens sixteen at a time and
queries eight, so that eight query heads a KV head fill them and four half of them. Logarithms are to base 2 inside.

Names: p_ pointer, i_ index, n_ count, c_ column (16-bit word of a token's nibble plane), m running maximum.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
# What Triton compiles is less than Python: a tuple grows by +, and where a constant decides, what follows a return is
# compiled unless it stands in an else.
# ruff: noqa: RUF005, RET505, SIM108
from __future__ import annotations

import triton
import triton.language as tl

from hisparse.ops.decode.codes import bound, codes, exp2, inverse, log2, operand, rotate

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SPLIT = tl.constexpr(4.2)
HEADROOM = tl.constexpr(10.0)
LEAST = tl.constexpr(7.8886091e-31)
"""2**-100, the least step that values are taken to have: weights of constant ones would leave float32."""
"""Weights are kept below 2**10 instead of 1: more of the small ones stay normal float16 numbers."""


@triton.constexpr_function
def _extra_unit(bits, mode):
    """What the extra bits of b, where they lie, have to be multiplied by to fit b where it lies; 0: there are none."""
    if bits == 6:
        return 16
    return 8 if bits == 5 and mode != 1 else 0


@triton.jit
def _words(p_row, c_group, n_group, PAD: tl.constexpr, TURNED: tl.constexpr):
    """int16 tile [tokens, columns] at `p_row` [tokens], or [columns, tokens] if TURNED; columns from `n_group` on are
    not read where there are any."""
    p_row = p_row[None, :] if TURNED else p_row[:, None]
    c = c_group[:, None] if TURNED else c_group[None, :]
    if PAD:
        return tl.load(p_row + c, mask=c < n_group, other=0)
    return tl.load(p_row + c)


@triton.jit
def _extra(p_row, at, GP: tl.constexpr, WORDS: tl.constexpr, EIGHTH: tl.constexpr, TURNED: tl.constexpr):
    """For each column of a group the 16-bit word of an extra plane that holds its bits, int16 as `_words`.

    A word serves four columns, D/16 apart. Reading it once and repeating it in registers costs nothing there; reading
    it for each column would cost as much L2 bandwidth as the nibbles do. Of more than four groups, each of fewer WORDS
    than the plane has, not every one begins at the plane's first word."""
    TOKENS: tl.constexpr = p_row.shape[0]
    if GP % EIGHTH == 0 and WORDS % EIGHTH == 0 and (EIGHTH & (EIGHTH - 1)) == 0:
        x = _words(p_row, tl.arange(0, EIGHTH), EIGHTH, False, TURNED)
        if TURNED:
            x = tl.broadcast_to(x[None, :, :], (GP // EIGHTH, EIGHTH, TOKENS)).reshape(GP, TOKENS)
        else:
            x = tl.broadcast_to(x[:, None, :], (TOKENS, GP // EIGHTH, EIGHTH)).reshape(TOKENS, GP)
        return x
    else:
        return _words(p_row, at % EIGHTH, EIGHTH, False, TURNED)


@triton.jit
def _read(p_nibble, p_extra, p_turn, split, i_group, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
          MODE: tl.constexpr, SIMD: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    """Codes of one channel group: float16 tiles [tokens, GP], or [GP, tokens] if TURNED. p_nibble, p_extra: int16
    pointers [tokens] to the token's planes; split: bool [tokens], used in mixed mode."""
    WORDS: tl.constexpr = GROUP // 4
    GP: tl.constexpr = max(16, triton.next_power_of_2(WORDS))
    EIGHTH: tl.constexpr = D // 16  # 16-bit words of one extra plane
    c = tl.arange(0, GP)
    at = i_group * WORDS + c
    w = _words(p_nibble, at, (i_group + 1) * WORDS, GP != WORDS, TURNED)
    if BITS == 4:
        return codes(w, w, w, w, w, BITS, MODE, SIMD)
    turn = tl.load(p_turn + at)
    turn = turn[:, None] if TURNED else turn[None, :]
    xa = rotate(_extra(p_extra, at, GP, WORDS, EIGHTH, TURNED), turn, SIMD)
    if BITS == 6:
        xb = rotate(_extra(p_extra + EIGHTH, at, GP, WORDS, EIGHTH, TURNED), turn, SIMD)
        return codes(w, xa, xb, w, w, BITS, MODE, SIMD)
    if MODE == 2:
        keep_a = tl.where(split, 0x30, 0x10).to(tl.int16)
        keep_b = tl.where(split, 0, 0x20).to(tl.int16)
        keep_a = keep_a[None, :] if TURNED else keep_a[:, None]
        keep_b = keep_b[None, :] if TURNED else keep_b[:, None]
        return codes(w, xa, xa, keep_a, keep_b, BITS, MODE, SIMD)
    return codes(w, xa, xa, xa, xa, BITS, MODE, SIMD)


@triton.jit
def _lift(tiles, EXACT: tl.constexpr):
    """The tiles of `_read`, where a code is worth 2**-24, or, if EXACT, with codes worth 2**-10.

    The matrix units align the terms of a sum to the one that looks largest, for which a subnormal number has the
    exponent of the smallest normal one. So sums of products of subnormal codes lack the last bits of float32: much less
    than float16 and bfloat16 queries lack, much more than float32 ones."""
    if EXACT:
        lifted = ()
        for i in tl.static_range(len(tiles)):
            lifted = lifted + (tiles[i] * 16384.0,)
        return lifted
    else:
        return tiles


@triton.jit
def _scales(p_word, MODE: tl.constexpr):
    """Step of a, step of b, zero (float32 [tokens]) and whether the block is split, from the pages' scale words."""
    word = tl.load(p_word)
    # The sign of the step is known but in mixed mode: masking it away would cost an instruction a scale.
    step = ((word & 0x7FFF if MODE == 2 else word) << 16).to(tl.float32, bitcast=True)
    step = -step if MODE == 1 else step
    zero = (word & -0x10000).to(tl.float32, bitcast=True)
    split = (word & 0x8000) != 0
    if MODE == 0:
        fast = step
    elif MODE == 1:
        fast = step * SPLIT
    else:
        fast = tl.where(split, step * SPLIT, step)
    return step, fast, zero, split


@triton.jit
def packed_share(
    p_q, p_out, p_lse, p_mass, p_turn, p_order, p_k_mean, p_k_scale, p_v_mean, p_v_scale, p_pool, p_table, n_pages,
    i_head, i_share, n_share, scaling, stride_q, stride_out, stride_lse, stride_mass,
    D: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, FMT: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
    MASS: tl.constexpr, SIMD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Share `i_share` of `n_share` of one sequence's pages, for the Q query heads of one KV head.

    p_q: the first of them; p_out, p_lse, p_mass: its results. FMT: (tokens, page bytes, group, 0, then of K and of V:
    bits, mode, byte offsets of nibbles, extra, scales).
    """
    TOKENS: tl.constexpr = FMT[0]
    PAGE_BYTES: tl.constexpr = FMT[1]
    GROUP: tl.constexpr = FMT[2]
    KB: tl.constexpr = FMT[4]
    KM: tl.constexpr = FMT[5]
    VB: tl.constexpr = FMT[9]
    VM: tl.constexpr = FMT[10]
    KX: tl.constexpr = _extra_unit(KB, KM)
    VX: tl.constexpr = _extra_unit(VB, VM)
    HALF: tl.constexpr = D // 2
    WORDS: tl.constexpr = GROUP // 4
    G: tl.constexpr = D // GROUP
    GP: tl.constexpr = max(16, triton.next_power_of_2(WORDS))
    i_q = tl.arange(0, QP)
    c = tl.arange(0, GP)
    n_tokens = n_pages * TOKENS
    n_tiles = tl.cdiv(n_tokens, BLOCK)
    first = (i_share * n_tiles.to(tl.int64) // n_share).to(tl.int32)
    last = ((i_share + 1) * n_tiles.to(tl.int64) // n_share).to(tl.int32)

    # The queries: scaled, in the units of the normalised keys, in stored channel order, rounded to float16 by position.
    raw = ()
    means = tl.zeros((GP, QP), tl.float32)
    largest = 0.0
    for g in tl.static_range(G):
        for m in tl.static_range(4):
            inside = c < WORDS
            stored = 2 * (g * WORDS + c) + m // 2 + (m % 2) * HALF
            channel = tl.load(p_order + stored, mask=inside, other=0).to(tl.int32)
            scale = tl.load(p_k_scale + i_head * D + channel, mask=inside, other=0.0)
            offset = tl.load(p_k_mean + i_head * D + channel, mask=inside, other=0.0)
            seen = inside[:, None] & (i_q < Q)[None, :]
            q = tl.load(p_q + i_q[None, :] * stride_q + channel[:, None], mask=seen, other=0.0).to(tl.float32)
            q *= scaling * LOG2E
            means += q * offset[:, None]
            q *= scale[:, None]
            largest = tl.maximum(largest, tl.max(tl.max(tl.abs(q), 1), 0))
            raw = raw + (q,)
    # Summed last: a product that goes straight into a sum over lanes is fused into its additions. Each lane's sum would
    # then differ in the last bit, and which of them the others read would be chance.
    mean = tl.sum(means, 0)
    largest = tl.where(largest > 0, largest, 1.0)
    unit = largest / 1024  # of the float16 queries
    high = ()
    low = ()
    sums = ()  # [QP] a group: what a zero of one adds to the score
    for g in tl.static_range(G):
        total = tl.zeros((QP,), tl.float32)
        for m in tl.static_range(4):
            place = 1.0 - (m % 2) * 0.9375  # b is worth 16 codes where it lies
            q = raw[4 * g + m] / unit * place
            h = q.to(tl.float16)
            high = high + (h,)
            q_used = h.to(tl.float32)
            if EXACT:
                h = (q - q_used).to(tl.float16)
                low = low + (h,)
                q_used += h.to(tl.float32)
            total += tl.sum(q_used, 0) / place
        sums = sums + (total * unit,)
    CODE_UNIT: tl.constexpr = 1024.0 if EXACT else 16777216.0  # see _lift
    unit *= CODE_UNIT

    acc = ()  # [GP, QP] by group and position
    zeros = ()  # [BLOCK, QP] by group (and half where a step of its own): sum of weight * zero / step
    for _ in tl.static_range(4 * G):
        acc = acc + (tl.zeros((GP, QP), tl.float32),)
    for _ in tl.static_range(2 * G if VM else G):
        zeros = zeros + (tl.zeros((BLOCK, QP), tl.float32),)
    mass = tl.zeros((BLOCK, QP), tl.float32)
    m_run = tl.full((QP,), float("-inf"), tl.float32)
    p_pool16 = p_pool.to(tl.pointer_type(tl.int16))
    p_pool32 = p_pool.to(tl.pointer_type(tl.int32))

    for i_tile in tl.range(bound(first), bound(last), num_stages=STAGES):
        t = i_tile * BLOCK + tl.arange(0, BLOCK)
        valid = t < n_tokens
        t = tl.minimum(t, n_tokens - 1)
        page = tl.load(p_table + t // TOKENS).to(tl.int64)
        row = i_head * TOKENS + t % TOKENS
        p_page = p_pool16 + page * (PAGE_BYTES // 2)
        p_scale = p_pool32 + page * (PAGE_BYTES // 4) + i_head * G
        p_kn = p_page + FMT[6] // 2 + row * (D // 4)
        p_kx = p_page + FMT[7] // 2 + row * ((KB - 4) * (D // 16))
        # The mask is what the scores start from, so that it costs nothing for each of them.
        s = tl.zeros((BLOCK, QP), tl.float32) + tl.where(valid, 0.0, float("-inf"))[:, None]
        for g in tl.static_range(G):
            step, fast, zero, split = _scales(p_scale + FMT[8] // 4 + g, KM)
            k = _lift(_read(p_kn, p_kx, p_turn, split, g, D, KB, GROUP, KM, SIMD, False), EXACT)
            a = tl.dot(k[0], high[4 * g])
            a = tl.dot(k[2], high[4 * g + 2], a)
            if KM == 0:
                b = a
            else:
                b = tl.zeros((BLOCK, QP), tl.float32)
            b = tl.dot(k[1], high[4 * g + 1], b)
            b = tl.dot(k[3], high[4 * g + 3], b)
            if KX:
                b = tl.dot(k[4], high[4 * g + 1] * KX, b)
                b = tl.dot(k[5], high[4 * g + 3] * KX, b)
            if EXACT:
                if KX:
                    b = tl.dot(k[4], low[4 * g + 1] * KX, b)
                    b = tl.dot(k[5], low[4 * g + 3] * KX, b)
                b = tl.dot(k[1], low[4 * g + 1], b)
                b = tl.dot(k[3], low[4 * g + 3], b)
                ab = a if KM else b
                ab = tl.dot(k[0], low[4 * g], ab)
                ab = tl.dot(k[2], low[4 * g + 2], ab)
                if KM == 0:
                    b = ab
                else:
                    a = ab
            s += zero[:, None] * sums[g][None, :]
            s += b * (fast * unit)[:, None]
            if KM:
                s += a * (step * unit)[:, None]

        v_step = ()
        v_fast = ()
        v_zero = ()
        v_split = ()
        peak = tl.zeros((BLOCK,), tl.float32)
        for g in tl.static_range(G):
            step, fast, zero, split = _scales(p_scale + FMT[13] // 4 + g, VM)
            step, fast = tl.maximum(step, LEAST), tl.maximum(fast, LEAST)
            peak = tl.maximum(peak, fast)
            v_step = v_step + (step,)
            v_fast = v_fast + (fast,)
            v_zero = v_zero + (zero,)
            v_split = v_split + (split,)
        # The maximum is taken over score * step, so that the float16 weights stay in range whatever the steps are.
        m_new = tl.maximum(m_run, tl.max(s + log2(peak, SIMD)[:, None], 0))
        alpha = exp2(m_run - m_new, SIMD)[None, :]
        m_run = m_new
        p = exp2(s - (m_new - HEADROOM)[None, :], SIMD)
        mass = mass * alpha + p
        if MASS:
            share = tl.sum(tl.reshape(p, (BLOCK // TOKENS, TOKENS, QP)), 1)
            share = (tl.log2(share) + (m_new - HEADROOM + mean)[None, :]) * LN2
            i_page = i_tile * (BLOCK // TOKENS) + tl.arange(0, BLOCK // TOKENS)
            real = (i_page < n_pages)[:, None] & (i_q < Q)[None, :]
            tl.store(p_mass + i_q[None, :] * stride_mass + i_page[:, None], share, mask=real)
        p_vn = p_page + FMT[11] // 2 + row * (D // 4)
        p_vx = p_page + FMT[12] // 2 + row * ((VB - 4) * (D // 16))
        new_acc = ()
        new_zeros = ()
        for g in tl.static_range(G):
            v = _lift(_read(p_vn, p_vx, p_turn, v_split[g], g, D, VB, GROUP, VM, SIMD, True), EXACT)
            pa32 = p * v_step[g][:, None]
            pa = pa32.to(tl.float16)
            # The rounded weights also carry the zeros: code and zero cancel, so they must be rounded alike.
            used = pa32 if EXACT else pa.to(tl.float32)
            z = zeros[2 * g if VM else g]
            new_zeros = new_zeros + (z * alpha + used * (v_zero[g] * inverse(v_step[g], SIMD))[:, None],)
            pb32 = pa32
            pb = pa
            if VM:
                pb32 = p * v_fast[g][:, None]
                pb = pb32.to(tl.float16)
                used = pb32 if EXACT else pb.to(tl.float32)
                new_zeros = new_zeros + (
                    zeros[2 * g + 1] * alpha + used * (v_zero[g] * inverse(v_fast[g], SIMD))[:, None],
                )
            for m in tl.static_range(4):
                weight = pa if m % 2 == 0 else pb
                o = tl.dot(v[m], weight, acc[4 * g + m] * alpha)
                if VX and m % 2:
                    o = tl.dot(v[4 + m // 2], weight * VX, o)
                if EXACT:
                    lost = (pa32 if m % 2 == 0 else pb32) - weight.to(tl.float32)
                    tiny = tl.dot(v[m], (lost * 1024).to(tl.float16))
                    if VX and m % 2:
                        tiny = tl.dot(v[4 + m // 2], (lost * 1024).to(tl.float16) * VX, tiny)
                    o += tiny * 0.0009765625
                new_acc = new_acc + (o,)
        acc = new_acc
        zeros = new_zeros

    l_sum = tl.sum(mass, 0)
    tl.store(p_lse + i_q * stride_lse, tl.log2(l_sum) + m_run - HEADROOM + mean, mask=i_q < Q)
    for g in tl.static_range(G):
        for m in tl.static_range(4):
            inside = c < WORDS
            channel = 2 * (g * WORDS + c) + m // 2 + (m % 2) * HALF
            scale = tl.load(p_v_scale + i_head * D + channel, mask=inside, other=0.0)
            offset = tl.load(p_v_mean + i_head * D + channel, mask=inside, other=0.0)
            code_unit = CODE_UNIT / (1 + 15 * (m % 2))
            zero = tl.sum(zeros[2 * g + m % 2 if VM else g], 0)
            o = (acc[4 * g + m] * code_unit + zero[None, :]) / l_sum[None, :] * scale[:, None] + offset[:, None]
            seen = inside[:, None] & (i_q < Q)[None, :]
            tl.store(p_out + i_q[None, :] * stride_out + channel[:, None], o, mask=seen)


@triton.jit
def plain_share(
    p_q, p_k, p_v, p_logit, p_out, p_lse, p_mass, p_table, n_tokens, i_share, n_share, scaling, stride_q, stride_logit,
    stride_out, stride_lse, stride_mass, stride_token, stride_page,
    D: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    GIVEN: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """As packed_share for keys and values in a float dtype: rows `stride_token` apart at p_k and p_v, or, with TOKENS
    set, in pages of as many tokens, `stride_page` elements apart. GIVEN: scores are read from p_logit, not computed."""
    DP: tl.constexpr = triton.next_power_of_2(D)
    i_q = tl.arange(0, QP)
    d = tl.arange(0, DP)
    n_tiles = tl.cdiv(n_tokens, BLOCK)
    first = (i_share * n_tiles.to(tl.int64) // n_share).to(tl.int32)
    last = ((i_share + 1) * n_tiles.to(tl.int64) // n_share).to(tl.int32)
    inside = (d < D)[:, None] & (i_q < Q)[None, :]
    acc = tl.zeros((DP, QP), tl.float32)
    mass = tl.zeros((QP,), tl.float32)
    m_run = tl.full((QP,), float("-inf"), tl.float32)
    if not GIVEN:
        q = tl.load(p_q + i_q[None, :] * stride_q + d[:, None], mask=inside, other=0.0).to(p_k.dtype.element_ty)
    for i_tile in tl.range(
        bound(first), bound(last), num_stages=1
    ):  # few tiles: shared memory is worth more to the packed shares
        t = i_tile * BLOCK + tl.arange(0, BLOCK)
        valid = t < n_tokens
        seen = valid[:, None] & (d < D)[None, :]
        if TOKENS:
            page = tl.load(p_table + tl.minimum(t, n_tokens - 1) // TOKENS).to(tl.int64)
            at = (page * stride_page + (t % TOKENS) * stride_token)[:, None] + d[None, :]
        else:
            at = (t.to(tl.int64) * stride_token)[:, None] + d[None, :]
        if GIVEN:
            scored = valid[:, None] & (i_q < Q)[None, :]
            s = tl.load(p_logit + i_q[None, :] * stride_logit + t[:, None], mask=scored, other=float("-inf")) * LOG2E
        else:
            k = tl.load(p_k + at, mask=seen, other=0.0)
            s = tl.dot(operand(k), operand(q), input_precision="ieee") * (scaling * LOG2E)
            s = tl.where(valid[:, None], s, float("-inf"))
        m_new = tl.maximum(m_run, tl.max(s, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # logits of -inf are allowed
        alpha = tl.exp2(m_run - m_safe)
        m_run = m_new
        p = tl.exp2(s - m_safe[None, :])
        mass = mass * alpha + tl.sum(p, 0)
        if MASS:
            share = tl.sum(tl.reshape(p, (BLOCK // TOKENS, TOKENS, QP)), 1)
            share = (tl.log2(share) + m_safe[None, :]) * LN2
            i_page = i_tile * (BLOCK // TOKENS) + tl.arange(0, BLOCK // TOKENS)
            stored = (i_page * TOKENS < n_tokens)[:, None] & (i_q < Q)[None, :]
            tl.store(p_mass + i_q[None, :] * stride_mass + i_page[:, None], share, mask=stored)
        v = tl.load(p_v + at, mask=seen, other=0.0)
        p = operand(p.to(v.dtype))
        acc = tl.dot(operand(tl.trans(v)), p, acc * alpha[None, :], input_precision="ieee")
    tl.store(p_lse + i_q * stride_lse, tl.log2(mass) + m_run, mask=i_q < Q)
    tl.store(p_out + i_q[None, :] * stride_out + d[:, None], acc / mass[None, :], mask=inside)


@triton.jit
def combine(
    p_part, p_part_lse, p_out, p_lse, n_share, stride_out,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """out = sum_i 2^(lse_i - lse) part_i over a query head's shares; a share that saw no token has lse -inf and is not
    read. lse is written in natural units; a head that saw no token at all gets 0 and -inf."""
    i_row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    every = tl.arange(0, ALL)
    lses = tl.load(p_part_lse + i_row * n_share + every, mask=every < n_share, other=float("-inf"))
    m = tl.max(lses, 0)
    m = tl.where(m == float("-inf"), 0.0, m)
    total = tl.sum(tl.exp2(lses - m), 0)
    acc = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for start in range(0, bound(n_share), BLOCK):
        i = start + tl.arange(0, BLOCK)
        lse = tl.load(p_part_lse + i_row * n_share + i, mask=i < n_share, other=float("-inf"))
        seen = (lse > float("-inf"))[:, None] & (d < D)[None, :]
        part = tl.load(p_part + (i_row * n_share + i)[:, None] * D + d[None, :], mask=seen, other=0.0)
        acc += part * tl.exp2(lse - m)[:, None]
    out = tl.sum(acc, 0) / tl.where(total > 0, total, 1.0)
    tl.store(p_out + i_row * stride_out + d, out, mask=d < D)
    tl.store(p_lse + i_row, (tl.log2(total) + m) * LN2)
