"""Attention over packed pages against softmax in float64 over what the pages hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse.config import VtqConfig
from hisparse.ops.attend import Packed, attend, attend_recalled
from hisparse.ops.pack import pack_pages
from hisparse.ops.unpack import unpack_pages
from hisparse.vtq import ChannelStats, PageFormat, estimate_stats

# float32: sums of hundreds of products; the others: their own rounding of inputs' products and of the output.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    dense_k: Tensor
    dense_v: Tensor
    packed: list[Packed]
    stats: ChannelStats

    def hand(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.dense_k, self.dense_v


def pages_of(n: int, fmt: PageFormat, stats: ChannelStats, dtype: torch.dtype, make: torch.Generator) -> Tensor:
    k, v = torch.randn(2, n, fmt.tokens, fmt.heads, fmt.head_dim, generator=make)
    return pack_pages((k + 1).to(dtype), v.to(dtype), stats, fmt)


def case(
    heads: int, group: int, dim: int, chunk: int, dense: int, pages: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32, seed: int = 0, raw: bool = False,
) -> Case:  # fmt: skip
    """`pages`: (number, tokens a page) of each packed part."""
    make = torch.Generator().manual_seed(seed)
    sample = torch.randn(2, 50, heads, dim, generator=make)
    stats = estimate_stats(sample[0] + 1, sample[1], torch.randperm(dim, generator=make))
    packed = []
    for n, tokens in pages:
        fmt = PageFormat.raw(dtype, heads, dim, tokens) if raw else PageFormat.vtq(VtqConfig(), heads, dim, tokens)
        packed.append(Packed(pages_of(n, fmt, stats, dtype, make), fmt))
    q = torch.randn(heads * group, chunk, dim, generator=make).to(dtype)
    k, v = (torch.randn(heads, chunk, dim, generator=make).to(dtype) for _ in range(2))
    dense_k, dense_v = (torch.randn(heads, dense, dim, generator=make).to(dtype) for _ in range(2))
    return Case(q, k, v, dense_k, dense_v, packed, stats)


def unpacked(part: Packed, stats: ChannelStats) -> tuple[np.ndarray, np.ndarray]:
    """k, v float64 [tokens, H, D]."""
    k, v = unpack_pages(part.pages, stats, part.fmt, torch.float32)
    return k.flatten(0, 1).double().numpy(), v.flatten(0, 1).double().numpy()


def oracle(c: Case, scaling: float, own: list[Packed] | None = None) -> np.ndarray:
    """Each query by itself; `own[t]` is seen by query t alone."""
    q_heads, chunk, _ = c.q.shape
    heads = c.k.shape[0]
    q, k, v = (x.double().numpy() for x in (c.q, c.k, c.v))
    past = [(x[0], x[1]) for x in (unpacked(part, c.stats) for part in c.packed)]
    past.append((c.dense_k.double().numpy().swapaxes(0, 1), c.dense_v.double().numpy().swapaxes(0, 1)))
    out = np.empty(q.shape)
    for t in range(chunk):
        here = [*past, (k[:, : t + 1].swapaxes(0, 1), v[:, : t + 1].swapaxes(0, 1))]
        if own is not None:
            here.append(unpacked(own[t], c.stats))
        keys, values = (np.concatenate([part[i] for part in here]) for i in (0, 1))
        for g in range(q_heads):
            h = g // (q_heads // heads)
            score = keys[:, h] @ q[g, t] * scaling
            weight = np.exp(score - score.max())
            out[g, t] = weight @ values[:, h] / weight.sum()
    return out


def close(found: Tensor, want: np.ndarray, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    np.testing.assert_allclose(found.double().numpy(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


PARTS = [[], [(5, 8)], [(0, 8), (3, 4)], [(4, 8), (7, 4)], [(1, 1), (2, 13), (3, 5)]]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 17])
@pytest.mark.parametrize("pages", PARTS, ids=str)
@pytest.mark.parametrize("dense", [0, 13])
def test_attention_is_softmax_over_all_that_is_visible(
    dtype: torch.dtype, chunk: int, pages: list[tuple[int, int]], dense: int
) -> None:
    c = case(2, 3, 64, chunk, dense, pages, dtype, seed=chunk)
    close(attend(*c.hand(), c.packed, c.stats, 0.2), oracle(c, 0.2), dtype)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("chunk", [1, 3])
def test_grouped_queries_read_their_own_head(group: int, heads: int, chunk: int) -> None:
    c = case(heads, group, 32, chunk, 9, [(3, 8), (2, 4)], seed=group)
    close(attend(*c.hand(), c.packed, c.stats, 0.3), oracle(c, 0.3), torch.float32)
    recalled = [Packed(c.packed[1].pages[t % 2 :][:1], c.packed[1].fmt) for t in range(chunk)]
    pages = torch.stack([part.pages for part in recalled])
    kept = Case(*c.hand(), c.packed[:1], c.stats)
    found = attend_recalled(*c.hand(), kept.packed, Packed(pages, c.packed[1].fmt), c.stats, 0.3)
    close(found, oracle(kept, 0.3, recalled), torch.float32)


@settings(max_examples=50, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.sampled_from([8, 40, 64, 96]),
    chunk=st.integers(1, 9),
    dense=st.integers(0, 20),
    pages=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=3),
    raw=st.booleans(),
    scaling=st.floats(0.01, 2),
    seed=st.integers(0, 2**31),
)
def test_any_shape(
    heads: int, group: int, dim: int, chunk: int, dense: int, pages: list[tuple[int, int]], raw: bool, scaling: float,
    seed: int,
) -> None:  # fmt: skip
    c = case(heads, group, dim, chunk, dense, pages, seed=seed, raw=raw)
    inputs = [x.clone() for x in c.hand()]
    found = attend(*c.hand(), c.packed, c.stats, scaling)
    np.testing.assert_allclose(found.double().numpy(), oracle(c, scaling), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(inputs, c.hand(), strict=True))


@settings(max_examples=50, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    chunk=st.integers(1, 9),
    dense=st.integers(0, 20),
    kept=st.integers(0, 4),
    rows=st.integers(1, 6),
    wanted=st.integers(0, 6),
    row_size=st.integers(1, 5),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**31),
)
def test_each_query_reads_its_own_rows(
    heads: int, group: int, chunk: int, dense: int, kept: int, rows: int, wanted: int, row_size: int,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    c = case(heads, group, 64, chunk, dense, [(kept, 8), (rows, row_size)], dtype, seed)
    source = c.packed.pop()
    make = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(rows, generator=make)[: min(wanted, rows)] for _ in range(chunk)])
    pages = source.pages[chosen]
    found = attend_recalled(*c.hand(), c.packed, Packed(pages, source.fmt), c.stats, 0.2)
    close(found, oracle(c, 0.2, [Packed(pages[t], source.fmt) for t in range(chunk)]), dtype)


@pytest.mark.parametrize("chunk", [1, 5])
def test_recalling_all_rows_is_attending_to_them(chunk: int) -> None:
    c = case(2, 3, 64, chunk, 11, [(4, 8), (9, 4)])
    rows = c.packed[1]
    all_rows = Packed(rows.pages.expand(chunk, -1, -1), rows.fmt)
    one = attend(*c.hand(), c.packed, c.stats, 0.125)
    other = attend_recalled(*c.hand(), c.packed[:1], all_rows, c.stats, 0.125)
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_nothing_packed_needs_no_statistics() -> None:
    c = case(2, 2, 64, 4, 6, [])
    close(attend(*c.hand(), [], None, 0.2), oracle(c, 0.2), torch.float32)
