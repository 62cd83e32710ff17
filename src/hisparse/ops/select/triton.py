"""Row selection with Triton: the softmax's denominators in one pass over the scores, the rows' worth in a second, and
the radix selection of :mod:`hisparse.ops.scan.choose`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.ops.scan.kernels import bound
from hisparse.ops.scan.triton import select_top

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
CHUNK = 16384
BLOCK = 1024
ROWS = 128
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _denominators(p_scores, p_part, n_tokens, n_chunk, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """p_part float32 [queries, chunks]: log2 of the sum of the exponentials of a chunk's scores."""
    i_query, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_scores += i_query * n_tokens
    i = tl.arange(0, BLOCK)
    start = i_chunk * CHUNK
    end = tl.minimum(start + CHUNK, n_tokens)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(bound(start), bound(end), BLOCK):
        s = tl.load(p_scores + at + i, mask=at + i < end, other=float("-inf")) * LOG2E
        higher = tl.maximum(peak, s)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(peak - safe) + tl.exp2(s - safe)
        peak = higher
    top = tl.max(peak, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(p_part + i_query * n_chunk + i_chunk, safe + tl.log2(tl.sum(total * tl.exp2(peak - safe), 0)))


@triton.jit
def _worth(
    p_scores, p_part, p_worth, n_rows, n_chunk, n_heads, n_queries,
    R: tl.constexpr, RP: tl.constexpr, ROWS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """p_scores float32 [heads, queries, rows * R]; p_worth float32 [rows]."""
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < n_rows
    j = tl.arange(0, RP)
    c = tl.arange(0, CP)
    at = i_row.to(tl.int64)[:, None] * R + j[None, :]
    seen = m_row[:, None] & (j < R)[None, :]
    worth = tl.zeros((ROWS,), tl.float32)
    for t in range(bound(n_queries)):
        here = tl.zeros((ROWS,), tl.float32)
        for h in range(bound(n_heads)):
            i_query = h * n_queries + t
            part = tl.load(p_part + i_query * n_chunk + c, mask=c < n_chunk, other=float("-inf"))
            top = tl.max(part, 0)
            log = top + tl.log2(tl.sum(tl.exp2(part - top), 0))
            base = p_scores + tl.cast(i_query, tl.int64) * n_rows * R
            s = tl.load(base + at, mask=seen, other=float("-inf")) * LOG2E
            here += tl.sqrt(tl.sum(tl.exp2(s - log), 1))
        worth = tl.maximum(worth, here)
    tl.store(p_worth + i_row, worth, mask=m_row)


def row_worth(scores: Tensor, row_size: int) -> Tensor:
    """float32 [n]: what each row is worth, of scores [Hq, T, n * row_size]."""
    scores = scores.contiguous()
    heads, queries, tokens = scores.shape
    rows = tokens // row_size
    worth = torch.empty(rows, dtype=torch.float32, device=scores.device)
    chunks = -(-tokens // CHUNK)
    part = torch.empty(heads * queries, chunks, dtype=torch.float32, device=scores.device)
    _denominators[(heads * queries, chunks)](scores, part, tokens, chunks, CHUNK, BLOCK)
    _worth[(-(-rows // ROWS),)](
        scores, part, worth, rows, chunks, heads, queries, row_size, triton.next_power_of_2(row_size), ROWS,
        triton.next_power_of_2(chunks),
    )  # fmt: skip
    return worth


def select_rows(scores: Tensor, row_size: int, count: int) -> Tensor:
    """See :func:`hisparse.ops.select.select_rows`."""
    rows = scores.shape[2] // row_size
    count = min(count, rows)
    if count <= 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    numbers = torch.arange(rows, dtype=torch.int32, device=scores.device)
    every = torch.full((1,), rows, dtype=torch.int32, device=scores.device)
    return (
        select_top(row_worth(scores, row_size)[None], numbers[None], every, count, None, heads=len(scores))
        .rows[0]
        .long()
    )
