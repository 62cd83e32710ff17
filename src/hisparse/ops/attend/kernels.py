"""Triton kernels around the library's attention: combining partial results, reading pages from the host, and the worth
of rows to a sample of queries."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.ops.fetch import HostRows
from hisparse.ops.sketch import STEP

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
LOG2E = tl.constexpr(1.4426950408889634)
QUERIES = 64
TOKENS = 128

if INTERPRET:

    def bound(x: Any) -> int:
        """A scalar as a loop bound: the interpreter's arrays of one element are none for recent versions of numpy."""
        return int(x.handle.data.item())

else:

    @triton.jit
    def bound(x):
        return x


@triton.jit(do_not_specialize=["n_query"])
def _merge(
    p_a, p_a_lse, p_b, p_b_lse, p_out, p_lse, n_query, a_head, a_query, b_head, b_query, out_head, out_query,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    m_query = m < n_query
    mask = m_query[:, None] & (d < D)[None, :]
    row = m.to(tl.int64)[:, None]
    a_lse = tl.load(p_a_lse + i_head * n_query + m, mask=m_query, other=0.0) * LOG2E
    b_lse = tl.load(p_b_lse + i_head * n_query + m, mask=m_query, other=0.0) * LOG2E
    a = tl.load(p_a + i_head * a_head + row * a_query + d[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(p_b + i_head * b_head + row * b_query + d[None, :], mask=mask, other=0.0).to(tl.float32)
    top = tl.maximum(a_lse, b_lse)
    a_share, b_share = tl.exp2(a_lse - top), tl.exp2(b_lse - top)
    total = a_share + b_share
    out = (a * a_share[:, None] + b * b_share[:, None]) / total[:, None]
    p_out += i_head * out_head
    tl.store(p_out + row * out_query + d[None, :], out.to(p_out.dtype.element_ty), mask=mask)
    tl.store(p_lse + i_head * n_query + m, (top + tl.log2(total)) / LOG2E, mask=m_query)


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax of two: a, b (result [H, M, D] of any float dtype and strides, natural log-sum-exp float32 [H, M]).

    out: [H, M, D], filled and returned with its log-sum-exp; it may be a's result.
    """
    heads, queries, dim = out.shape
    lse = torch.empty(heads, queries, dtype=torch.float32, device=out.device)
    block = max(1, min(32, 4096 // triton.next_power_of_2(dim)))
    _merge[(-(-queries // block), heads)](
        a[0], a[1].contiguous(), b[0], b[1].contiguous(), out, lse, queries, *a[0].stride()[:2], *b[0].stride()[:2],
        *out.stride()[:2], dim, triton.next_power_of_2(dim), block,
    )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["n_rows", "n_line"], do_not_specialize_on_alignment=["p_ids"])
def _gather(p_addresses, p_ids, p_out, n_rows, n_line, WORDS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """p_out int32 [n_rows, WORDS] of rows in the host's memory, row r in line r % n_line of segment r // n_line."""
    r = tl.arange(0, ROWS)
    w = tl.arange(0, WIDE)
    for start in range(bound(tl.program_id(0) * ROWS), bound(n_rows), bound(tl.num_programs(0) * ROWS)):
        i_row = start + r
        m_row = i_row < n_rows
        row = tl.load(p_ids + i_row, mask=m_row, other=0)
        p_row = tl.load(p_addresses + row // n_line, mask=m_row, other=0) + (row % n_line).to(tl.int64) * (4 * WORDS)
        mask = m_row[:, None] & (w < WORDS)[None, :]
        p_word = tl.multiple_of(p_row, 16).to(tl.pointer_type(tl.int32))[:, None] + w[None, :]
        p_word = tl.max_contiguous(tl.multiple_of(p_word, (1, 16)), (1, 4))
        words = tl.load(p_word, mask=mask, other=0)
        tl.store(p_out + i_row.to(tl.int64)[:, None] * WORDS + w[None, :], words, mask=mask)


def gather(source: HostRows, ids: Tensor, out: Tensor, programs: int = 16) -> None:
    """out uint8 [n, row_bytes] = rows `ids` int64 [n] (on the device) of the host's memory, pinned.

    As `hisparse.ops.fetch.gather_rows`, but by few programs, each with much in flight: the bus is slow enough for them,
    and the attention that runs beside them keeps its multiprocessors.
    """
    words = source.row_bytes // 4
    wide = triton.next_power_of_2(words)
    rows = max(1, 8192 // wide)
    options = {} if INTERPRET else {"num_warps": 8}
    ids = ids.contiguous()
    _gather[(min(programs, -(-len(ids) // rows)),)](
        source.addresses, ids, out.view(torch.int32), len(ids), source.per_segment, words, wide, rows, **options
    )


@triton.jit(do_not_specialize=["n_rows"])
def _coordinates(
    p_codes, p_scales, p_out, n_rows, HEADS: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr,
    C: tl.constexpr, STEP4: tl.constexpr, STEP2: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """p_out float16 [HEADS, n_rows * R, C] of sketches, p_codes int16 [n_rows, HEADS, R, PAIRS] as pairs of bytes."""
    i_head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    n_tokens = n_rows.to(tl.int64) * R
    m_t = t < n_tokens
    i = tl.arange(0, PP)
    mask = m_t[:, None] & (i < PAIRS)[None, :]
    at = (t // R * HEADS + i_head) * R + t % R
    pair = tl.load(p_codes + at[:, None] * PAIRS + i[None, :], mask=mask, other=0).to(tl.int32)
    scale = tl.exp2((tl.load(p_scales + at, mask=m_t, other=128).to(tl.float32) - 128.0) / 16)[:, None]
    p_token = p_out + (i_head.to(tl.int64) * n_tokens + t)[:, None] * C + i[None, :]
    for s in tl.static_range(2):
        code = ((pair >> (4 * s)) & 15).to(tl.float32)
        tl.store(p_token + s * PAIRS, ((code - 7.5) * STEP4 * scale).to(tl.float16), mask=mask)
    for s in tl.static_range(4):
        code = ((pair >> (8 + 2 * s)) & 3).to(tl.float32)
        tl.store(p_token + (2 + s) * PAIRS, ((code - 1.5) * STEP2 * scale).to(tl.float16), mask=mask)


def coordinates(codes: Tensor, scales: Tensor) -> Tensor:
    """float16 [H, n * R, C]: what sketches say of the keys, in their basis and without the mean key.

    codes uint8 [n, H, R, W], scales uint8 [n, H, R]: see :mod:`hisparse.ops.sketch`. C is 3 W, rounded up to a multiple
    of 8 with zeros.
    """
    n, heads, row_size, width = codes.shape
    filled = 3 * width
    wide = -(-filled // 8) * 8
    make = torch.empty if wide == filled else torch.zeros
    out = make(heads, n * row_size, wide, dtype=torch.float16, device=codes.device)
    if n:
        _coordinates[(-(-n * row_size // TOKENS), heads)](
            codes.contiguous().view(torch.int16), scales.contiguous(), out, n, heads, row_size, width // 2,
            triton.next_power_of_2(width // 2), wide, STEP[4], STEP[2], TOKENS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n_rows"])
def _worth(
    p_key, p_query, p_lse, p_worth, n_rows, n_query, n_heads,
    C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p_key float16 [H, rows * R, C]; p_query float16 [H, M, C], scaled to base 2; p_lse float32 [H, M], base 2."""
    i = tl.arange(0, ROWS * RP)
    i_row = tl.program_id(0) * ROWS + i // RP
    m_token = (i_row < n_rows) & (i % RP < R)
    token = (i_row * R + i % RP).to(tl.int64)
    c = tl.arange(0, CP)
    n = tl.arange(0, BLOCK)
    worth = tl.zeros((ROWS,), tl.float32)
    for h in range(bound(n_heads)):
        p_here = p_key + tl.cast(h, tl.int64) * n_rows * R * C
        key = tl.load(p_here + token[:, None] * C + c[None, :], mask=m_token[:, None] & (c < C)[None, :], other=0.0)
        for start in range(0, bound(n_query), BLOCK):
            m_query = start + n < n_query
            at = h * n_query + start + n
            query = tl.load(p_query + at[None, :] * C + c[:, None], mask=m_query[None, :] & (c < C)[:, None], other=0.0)
            lse = tl.load(p_lse + at, mask=m_query, other=float("inf"))  # a query that is not there gives nothing
            share = tl.exp2(tl.dot(key, query) - lse[None, :])
            share = tl.where(m_token[:, None], share, 0.0)
            row = tl.sum(tl.reshape(share, (ROWS, RP, BLOCK)), 1)
            worth += tl.sum(tl.sqrt(row), 1)
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(p_worth + i_row, worth, mask=i_row < n_rows)


def row_worth(keys: Tensor, queries: Tensor, lse: Tensor, row_size: int) -> Tensor:
    """float32 [n]: the sum over heads and queries of the root of the attention share that falls on each row.

    keys: float16 [H, n * row_size, C]; queries: float16 [H, M, C], scaling and log2(e) included; lse: float32 [H, M],
    log2 of the sum of each query's exponentials. All contiguous.
    """
    heads, tokens, width = keys.shape
    rows = tokens // row_size
    padded = triton.next_power_of_2(row_size)
    worth = torch.empty(rows, dtype=torch.float32, device=keys.device)
    each = max(1, TOKENS // padded)
    options = {} if INTERPRET else {"num_warps": 4}
    _worth[(-(-rows // each),)](
        keys, queries, lse, worth, rows, queries.shape[1], heads, width, max(16, triton.next_power_of_2(width)),
        row_size, padded, each, QUERIES, **options,
    )  # fmt: skip
    return worth
