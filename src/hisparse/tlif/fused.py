"""TLIF on a GPU in one pass over the rows: window statistics, both layers and the sigmoid without work space.

A program takes 64 tokens and the rows that their windows cover. Products of bfloat16 rows are exact in float32;
weights of a window's mean and of the first layer are split in two and three bfloat16 parts, so that the matrix units
compute them to 16 and 24 bits. Rows of other dtypes and longer windows are left to plain torch.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
QUERIES = 64  # tokens a program
MANY_QUERIES, MANY = 128, 16384
"""Tokens a program where there are so many tokens that all multiprocessors have work all the same: half the time."""
MANY_HIDDEN = 32
"""Width of the first layer up to which MANY_QUERIES fit into a multiprocessor's memory."""
LONGEST = 256 - QUERIES  # rows of a window
FEATURES = 32  # of a row at a time
SERVED = frozenset({64, 96, 128, 192, 512, 1024})
"""Values of a row that the kernel takes unasked: such as it has been checked with on a GPU."""
NORM_ROWS = 16
# The interpreter multiplies bfloat16 as the whole numbers of their bits.
OPERAND = tl.constexpr(tl.float32 if INTERPRET else tl.bfloat16)
EPS = tl.constexpr(1e-12)
MARGIN = tl.constexpr(1e-6)


@triton.jit(do_not_specialize=["n_rows"])
def _norms(p_rows, p_norm, n_rows, F: tl.constexpr, FP: tl.constexpr, ROWS: tl.constexpr):
    """p_norm float32 [n_rows]: the logarithm of each row's length."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    f = tl.arange(0, FP)
    mask = (r < n_rows)[:, None] & (f < F)[None, :]
    x = tl.load(p_rows + r.to(tl.int64)[:, None] * F + f[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(p_norm + r, 0.5 * tl.log(tl.maximum(tl.sum(x * x, 1), EPS)), mask=r < n_rows)


@triton.jit(do_not_specialize=["n_past", "n_tokens", "prefix"])
def _importance(
    p_rows, p_norm, p_weight, p_stat_weight, p_bias, p_second, p_out, n_past, n_tokens, prefix, second_bias,
    F: tl.constexpr, KEYS: tl.constexpr, HIDDEN: tl.constexpr, Q: tl.constexpr, FT: tl.constexpr,
):  # fmt: skip
    """p_rows bfloat16 [n_past + n_tokens, F]. p_weight bfloat16 [3, 2 F, HIDDEN], parts of the first layer's weights
    for the row and the row before it; p_stat_weight float32 [6, HIDDEN]; p_bias, p_second float32 [HIDDEN]."""
    i = tl.arange(0, Q)
    j = tl.arange(0, KEYS)
    f = tl.arange(0, FT)
    n = tl.arange(0, HIDDEN)
    token = tl.program_id(0) * Q + i
    m_token = token < n_tokens
    row = n_past + token
    first = n_past + tl.program_id(0) * Q - prefix
    key = first + j
    m_key = (key >= 0) & (key < n_past + n_tokens)
    key_norm = tl.load(p_norm + key, mask=m_key, other=0.0)
    inverse = tl.where(m_key, tl.exp(-key_norm), 0.0)
    band = (j[None, :] >= i[:, None]) & (j[None, :] < i[:, None] + prefix) & m_key[None, :]
    weight = tl.where(band, inverse[None, :], 0.0)
    weight_high = weight.to(tl.bfloat16)
    weight_low = (weight - weight_high.to(tl.float32)).to(tl.bfloat16).to(OPERAND)
    weight_high = weight_high.to(OPERAND)
    count = tl.minimum(row, prefix)
    share = 1.0 / tl.maximum(count, 1).to(tl.float32)
    own_norm = tl.load(p_norm + row, mask=m_token, other=0.0)
    own_inverse = tl.exp(-own_norm)
    m_before = m_token & (row > 0)

    score = tl.zeros((Q, KEYS), tl.float32)
    square = tl.zeros((Q,), tl.float32)
    # Matrix units cut a sum off at each step, two bits below float32: large terms are summed by themselves.
    hidden = tl.zeros((Q, HIDDEN), tl.float32)
    hidden_before = tl.zeros((Q, HIDDEN), tl.float32)
    rest = tl.zeros((Q, HIDDEN), tl.float32)
    p_key = p_rows + key.to(tl.int64)[:, None] * F + f[None, :]
    p_own = p_rows + row.to(tl.int64)[:, None] * F + f[None, :]
    p_first = p_weight + f[:, None] * HIDDEN + n[None, :]
    for at in range(0, F, FT):
        m_f = at + f < F
        k = tl.load(p_key + at, mask=m_key[:, None] & m_f[None, :], other=0.0).to(OPERAND)
        x = tl.load(p_own + at, mask=m_token[:, None] & m_f[None, :], other=0.0).to(OPERAND)
        before = tl.load(p_own + at - F, mask=m_before[:, None] & m_f[None, :], other=0.0).to(OPERAND)
        score = tl.dot(x, tl.trans(k), score)
        centre = tl.dot(weight_low, k)
        centre = tl.dot(weight_high, k, centre) * share[:, None]
        apart = x.to(tl.float32) * own_inverse[:, None] - centre
        square += tl.sum(apart * apart, 1)
        for part in tl.static_range(3):
            p_part = p_first + (part * 2 * F + at) * HIDDEN
            newer = tl.load(p_part, mask=m_f[:, None], other=0.0).to(OPERAND)
            older = tl.load(p_part + F * HIDDEN, mask=m_f[:, None], other=0.0).to(OPERAND)
            if part == 0:
                hidden = tl.dot(x, newer, hidden)
                hidden_before = tl.dot(before, older, hidden_before)
            else:
                rest = tl.dot(before, older, tl.dot(x, newer, rest))

    hidden += hidden_before + rest
    score = score * own_inverse[:, None] * inverse[None, :]
    similarity = tl.sum(tl.where(band, score, 0.0), 1) * share
    nearest = tl.max(tl.where(band, score, 0.0), 1)
    previous = tl.sum(tl.where(j[None, :] == i[:, None] + prefix - 1, score, 0.0), 1)
    window_norm = tl.sum(tl.where(band, key_norm[None, :], 0.0), 1) * share
    relative = tl.where(count > 0, own_norm - window_norm, 0.0)
    p_stat = p_stat_weight + n
    hidden += tl.load(p_bias + n)[None, :] + own_norm[:, None] * tl.load(p_stat)[None, :]
    hidden += tl.sqrt(square)[:, None] * tl.load(p_stat + HIDDEN)[None, :]
    hidden += similarity[:, None] * tl.load(p_stat + 2 * HIDDEN)[None, :]
    hidden += nearest[:, None] * tl.load(p_stat + 3 * HIDDEN)[None, :]
    hidden += previous[:, None] * tl.load(p_stat + 4 * HIDDEN)[None, :]
    hidden += relative[:, None] * tl.load(p_stat + 5 * HIDDEN)[None, :]
    active = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
    logit = tl.sum(active * tl.load(p_second + n)[None, :], 1) + second_bias
    out = 1.0 / (1.0 + tl.exp(-logit))
    tl.store(p_out + token, tl.minimum(tl.maximum(out, MARGIN), 1.0 - MARGIN), mask=m_token)


class FusedWeights:
    """A network's weights as the kernel reads them, on one device."""

    def __init__(self, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor) -> None:
        hidden, features = first.shape[0], (first.shape[1] - 6) // 2
        self.features = features
        self.hidden = max(16, triton.next_power_of_2(hidden))

        def padded(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, self.hidden - hidden)).contiguous()

        rest, parts = padded(first[:, : 2 * features].T), []
        for _ in range(3):
            parts.append(rest.bfloat16())
            rest = rest - parts[-1].float()
        self.first = torch.stack(parts)
        self.statistics = padded(first[:, 2 * features :].T)
        self.bias, self.second = padded(first_bias), padded(second[0])
        self.second_bias = float(second_bias)

    def holds_many(self, prefix: int) -> bool:
        """True where a program has room for MANY_QUERIES tokens and the rows of their windows."""
        return prefix + MANY_QUERIES <= 256 and self.hidden <= MANY_HIDDEN

    def importance(self, values: Tensor, recent: Tensor, prefix: int, queries: int | None = None) -> Tensor:
        """float32 [T] of values bfloat16 [T, F] that follow recent [R <= prefix, F].

        queries: tokens a program, 64, or 128 where `holds_many`; None for what is fastest.
        """
        tokens, past = len(values), len(recent)
        out = torch.empty(tokens, dtype=torch.float32, device=values.device)
        if not tokens:
            return out
        if queries is None:
            queries = MANY_QUERIES if tokens >= MANY and self.holds_many(prefix) else QUERIES
        rows = torch.cat((recent, values)) if past else values.contiguous()
        norm = torch.empty(len(rows), dtype=torch.float32, device=values.device)
        _norms[(-(-len(rows) // NORM_ROWS),)](
            rows, norm, len(rows), self.features, triton.next_power_of_2(self.features), NORM_ROWS
        )
        options: dict[str, Any] = {} if INTERPRET else {"num_warps": 8, "num_stages": 2}
        _importance[(-(-tokens // queries),)](
            rows, norm, self.first, self.statistics, self.bias, self.second, out, past, tokens, prefix,
            self.second_bias, self.features, triton.next_power_of_2(prefix + queries), self.hidden, queries, FEATURES,
            **options,
        )  # fmt: skip
        return out


def serves(values: Tensor, prefix: int) -> bool:
    """True for rows and windows that the kernel takes."""
    return values.dtype == torch.bfloat16 and values.shape[1] in SERVED and 0 < prefix <= LONGEST
