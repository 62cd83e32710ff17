"""Sketches with Triton.

Building: one program takes one head of a block of tokens through the basis, six products whose columns are the
coordinates of one bit field each, so that the codes come out where their bytes want them. Three products of tf32
parts each keep float32's accuracy on the matrix units. Bfloat16 keys have a kernel of their own,
:mod:`hisparse.ops.sketch.kernels`. Scoring: the operands of :mod:`hisparse.ops.scan.kernels`,
scores written out.
"""

# ruff: noqa: RUF005
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.ops.scan.kernels import (
    INTERPRET,
    STEP2,
    STEP4,
    decode_scale,
    raw_scores,
    read_weights,
    read_words,
)
from hisparse.ops.scan.triton import Plan, weights
from hisparse.ops.sketch import coordinates, kernels, reference
from hisparse.vtq.stats import ChannelStats

TOKENS = 64
QUERIES = 32
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _basis_tile(p_basis, d, m_d, c, D: tl.constexpr, first: tl.constexpr, W: tl.constexpr):
    mask = m_d[:, None] & (c < W)[None, :]
    return tl.load(p_basis + d[:, None] * D + (first + c)[None, :], mask=mask, other=0.0)


@triton.jit
def _code(x, factor, STEP: tl.constexpr, LEVELS: tl.constexpr):
    y = tl.floor(x * factor[:, None] / STEP + LEVELS // 2)
    return tl.minimum(tl.maximum(y, 0.0), LEVELS - 1.0).to(tl.int32)


@triton.jit
def _build(
    p_keys, p_mean, p_basis, p_codes, p_scales, n_tokens, stride_row, stride_token, stride_head,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, BD: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W: words of 16 bits of a token and head; p_codes: int16. Coordinates 0 .. 2 W - 1 get four bits, the next 4 W
    two."""
    i_head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    m_t = t < n_tokens
    c = tl.arange(0, WP)
    p_token = p_keys + (t // R) * stride_row + (t % R) * stride_token + i_head.to(tl.int64) * stride_head
    p_basis += i_head * D * D
    coordinate = ()
    for _ in tl.static_range(6):
        coordinate = coordinate + (tl.zeros((T, WP), tl.float32),)
    for d0 in tl.static_range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        m_d = d < D
        x = tl.load(p_token[:, None] + d[None, :], mask=m_t[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        x -= tl.load(p_mean + i_head * D + d, mask=m_d, other=0.0)[None, :]
        grown = ()
        for f in tl.static_range(6):
            basis = _basis_tile(p_basis, d, m_d, c, D, f * W, W)
            grown = grown + (tl.dot(x, basis, coordinate[f], input_precision=PRECISION),)
        coordinate = grown
    square = tl.zeros((T,), tl.float32)
    for f in tl.static_range(6):
        square += tl.sum(coordinate[f] * coordinate[f], 1)
    square = tl.maximum(square / (6 * W), 3.0517578125e-05)  # 2**-15
    exponent = tl.minimum(tl.maximum(tl.floor(tl.log2(square) * 8 + 128.5), 0.0), 255.0)
    factor = tl.exp2(8.0 - exponent * 0.0625)
    high = _code(coordinate[0], factor, STEP4, 16) | (_code(coordinate[1], factor, STEP4, 16) << 4)
    low = _code(coordinate[2], factor, STEP2, 4)
    for s in tl.static_range(1, 4):
        low |= _code(coordinate[2 + s], factor, STEP2, 4) << (2 * s)
    at = (t // R * HEADS + i_head) * R + t % R
    word = (high | low << 8).to(tl.int16)
    tl.store(p_codes + (at * W)[:, None] + c[None, :], word, mask=m_t[:, None] & (c < W)[None, :])
    tl.store(p_scales + at, exponent.to(tl.uint8), mask=m_t)


@triton.jit
def _score(
    p_weight, p_middle, p_offset, p_codes, p_scales, p_out, n_tokens, n_queries,
    HEADS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr, T: tl.constexpr,
    SIMD: tl.constexpr,
):  # fmt: skip
    """p_out float32 [H, queries of a KV head, tokens]; p_offset float32 [H, queries]: the mean key's share."""
    i_head, i_block = tl.program_id(1), tl.program_id(2)
    t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    m_t = t < n_tokens
    known = tl.minimum(t, n_tokens - 1)
    tiles, first = read_weights(p_weight, p_middle, i_block * HEADS + i_head, KP, NP)
    at = known // R * (HEADS * R) + known % R  # of head 0
    words = read_words(p_codes.to(tl.pointer_type(tl.int16)) + at * W, i_head, HEADS, W, 1, R, KP)
    scale = decode_scale(tl.load(p_scales + at + i_head * R)) * LN2
    n = i_block * NP + tl.arange(0, NP)
    m_n = n < n_queries
    at = i_head.to(tl.int64) * n_queries + n
    offset = tl.load(p_offset + at, mask=m_n, other=0.0)
    score = raw_scores(words, tiles, first, SIMD) * scale[:, None] + offset[None, :]
    tl.store(p_out + (at * n_tokens)[None, :] + t[:, None], score, mask=m_t[:, None] & m_n[None, :])


def build_sketch(keys: Tensor, stats: ChannelStats, bits: int) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.ops.sketch.build_sketch`."""
    n, rows, heads, dim = keys.shape
    words = coordinates(dim, bits)[0] // 2
    if keys.stride(3) != 1:
        keys = keys.contiguous()
    codes = torch.empty(n, heads, rows, 2 * words, dtype=torch.uint8, device=keys.device)
    scales = torch.empty(n, heads, rows, dtype=torch.uint8, device=keys.device)
    if not codes.numel():
        return codes, scales
    if kernels.serves(keys, stats):
        kernels.sketch(keys, stats, bits, codes.view(n, -1), scales.view(n, -1), rows)
        return codes, scales
    tokens = n * rows
    _build[(-(-tokens // TOKENS), heads)](
        keys, stats.k_mean, stats.sketch_basis.contiguous(), codes.view(torch.int16), scales, tokens,
        keys.stride(0), keys.stride(1), keys.stride(2), heads, dim, rows, words, max(16, triton.next_power_of_2(words)),
        32, TOKENS,
        "ieee" if INTERPRET else "tf32x3",
    )  # fmt: skip
    return codes, scales


def sketch_tokens(
    keys: Tensor, tokens: Tensor, stats: ChannelStats, bits: int, codes: Tensor, scales: Tensor, places: Tensor
) -> None:
    """See :func:`hisparse.ops.sketch.sketch_tokens`."""
    even = codes.stride(0) % 2 == 0 and codes.data_ptr() % 2 == 0 and codes.stride(1) == scales.stride(1) == 1
    if even and kernels.serves(keys, stats):
        tokens, places = tokens.contiguous(), places.contiguous()
        kernels.sketch(keys, stats, bits, codes, scales, tokens.shape[1], tokens, places)
    else:
        reference.sketch_tokens(keys, tokens, stats, bits, codes, scales, places, build_sketch)


def score_sketch(queries: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float) -> Tensor:
    """See :func:`hisparse.ops.sketch.score_sketch`."""
    q_heads, chunk, dim = queries.shape
    n, heads, rows, width = codes.shape
    tokens, count = n * rows, q_heads // heads * chunk
    out = torch.empty(q_heads, chunk, tokens, dtype=torch.float32, device=queries.device)
    if not out.numel():
        return out
    block = max(8, min(QUERIES, triton.next_power_of_2(count)))
    blocks = -(-count // block)
    q = queries.reshape(heads, count, dim).float()
    offset = torch.einsum("hcd,hd->hc", q, stats.k_mean) * scaling
    q = torch.nn.functional.pad(q, (0, 0, 0, blocks * block - count)).contiguous()
    words = width // 2
    plan = Plan(words, 1, heads, max(16, triton.next_power_of_2(words)), block)
    weight, middle = weights(q, stats, scaling, plan, (block * dim, q.stride(0), dim), blocks, block)
    options = {} if INTERPRET else {"num_warps": 2}
    _score[(-(-tokens // TOKENS), heads, blocks)](
        weight, middle, offset.contiguous(), codes.contiguous(), scales.contiguous(), out, tokens, count, heads, rows,
        words, plan.columns, block, TOKENS, not INTERPRET, **options,
    )  # fmt: skip
    return out
