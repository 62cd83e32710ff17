"""Window statistics against a float64 oracle that looks at one row at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.tlif.statistics import STATISTICS, network_inputs, previous_rows, window_statistics


def oracle(rows: np.ndarray, start: int, prefix: int) -> np.ndarray:
    """Statistics of rows[start:] [T, F], float64."""
    out = []
    for t in range(start, len(rows)):
        x, window = rows[t], rows[max(0, t - prefix) : t]
        size = np.linalg.norm(x)
        if not len(window):
            out.append([np.log(size), 1.0, 0.0, 0.0, 0.0, 0.0])
            continue
        sizes = np.linalg.norm(window, axis=1)
        cosines = window @ x / (sizes * size)
        centre = (window / sizes[:, None]).mean(0)
        distance = np.linalg.norm(x / size - centre)
        relative = np.log(size) - np.log(sizes).mean()
        out.append([np.log(size), distance, cosines.mean(), max(cosines.max(), 0), cosines[-1], relative])
    return np.array(out).reshape(-1, len(STATISTICS))


@pytest.mark.parametrize("tokens", [1, 2, 5, 63, 123, 1000])
@pytest.mark.parametrize("past", [0, 1, 7, 16])
@pytest.mark.parametrize("prefix", [16, 50])
def test_statistics_agree_with_the_oracle(tokens: int, past: int, prefix: int) -> None:
    rows = np.random.default_rng(tokens + past).normal(size=(past + tokens, 12)) + 0.3
    rows[::5] = rows[0]  # duplicates
    given_rows = torch.tensor(rows, dtype=torch.float32)
    found = window_statistics(given_rows[past:], given_rows[:past], prefix)
    np.testing.assert_allclose(found.numpy(), oracle(rows, past, prefix), atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 90), max_size=6), prefix=st.sampled_from([1, 3, 8, 128]), seed=st.integers(0, 2**16)
)
def test_pieces_give_what_one_call_gives(cuts: list[int], prefix: int, seed: int) -> None:
    rows = torch.randn(90, 6, generator=torch.Generator().manual_seed(seed))
    whole = network_inputs(rows, rows[:0], prefix)
    edges = [0, *sorted(cuts), 90]
    pieces = [
        network_inputs(rows[low:high], rows[max(0, low - prefix) : low], prefix)
        for low, high in itertools.pairwise(edges)
    ]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-5, rtol=0)


def test_a_zero_row_has_finite_statistics() -> None:
    rows = torch.zeros(9, 4)
    assert window_statistics(rows, rows[:0], 4).isfinite().all()
    assert window_statistics(rows[:1], rows[:3], 4).isfinite().all()


def test_no_tokens_give_no_statistics() -> None:
    rows = torch.randn(3, 4)
    assert window_statistics(rows[:0], rows, 4).shape == (0, len(STATISTICS))
    assert previous_rows(rows[:0], rows).shape == (0, 4)


def test_the_first_row_has_a_row_of_zeros_before_it() -> None:
    rows = torch.randn(3, 4)
    assert torch.equal(previous_rows(rows, rows[:0]), torch.cat((torch.zeros(1, 4), rows[:2])))
