"""Row selection against a count by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.ops.select import select_rows


def worth_by_hand(scores: torch.Tensor, row_size: int) -> list[float]:
    """A row's worth: over queries the largest sum over heads of the root of the head's share of attention."""
    heads, queries, tokens = scores.shape
    worth = [0.0] * (tokens // row_size)
    for t in range(queries):
        total = [0.0] * len(worth)
        for h in range(heads):
            values = scores[h, t].double().tolist()
            top = max(values)
            shares = [math.exp(x - top) for x in values]
            whole = math.fsum(shares)
            for r in range(len(worth)):
                total[r] += math.sqrt(math.fsum(shares[r * row_size : (r + 1) * row_size]) / whole)
        worth = [max(a, b) for a, b in zip(worth, total, strict=True)]
    return worth


@settings(max_examples=80, deadline=None)
@given(
    heads=st.integers(1, 5),
    queries=st.integers(1, 3),
    rows=st.integers(1, 23),
    row_size=st.integers(1, 6),
    count=st.integers(0, 30),
    sharpness=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 2**31),
)
def test_the_rows_of_most_worth_are_taken(
    heads: int, queries: int, rows: int, row_size: int, count: int, sharpness: float, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    scores = torch.randn(heads, queries, rows * row_size, generator=make) * sharpness
    before = scores.clone()
    chosen = select_rows(scores, row_size, count)
    assert torch.equal(scores, before)
    assert chosen.dtype == torch.int64
    assert len(set(chosen.tolist())) == len(chosen) == min(count, rows)
    worth = worth_by_hand(scores, row_size)
    taken = [worth[r] for r in chosen.tolist()]
    left = [w for r, w in enumerate(worth) if r not in set(chosen.tolist())]
    if taken and left:
        assert min(taken) >= max(left) - 1e-5


def test_a_head_with_one_confident_row_has_its_say() -> None:
    scores = torch.zeros(8, 1, 40)
    scores[7, 0, 21] = 50.0
    assert 21 // 4 in select_rows(scores, 4, 1).tolist()


def test_of_several_queries_each_gets_its_best_row() -> None:
    scores = torch.zeros(2, 3, 60)
    for t, token in enumerate((5, 33, 58)):
        scores[:, t, token] = 30.0
    assert sorted(select_rows(scores, 4, 3).tolist()) == [5 // 4, 33 // 4, 58 // 4]


@pytest.mark.parametrize("extreme", [-1e4, 1e4])
def test_extreme_scores_do_not_upset_the_choice(extreme: float) -> None:
    scores = torch.full((2, 1, 16), extreme)
    scores[:, :, 9] += 100
    assert select_rows(scores, 4, 1).tolist() == [2]
