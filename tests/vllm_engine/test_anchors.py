"""The share of decode attention that needs no recall."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_memory import Engine, Request, settings_of

from hisparse.integrations.vllm import anchors as module
from hisparse.integrations.vllm.anchors import AnchorShare

CPU = torch.device("cpu")
FEW = {"selection": {"min_tokens": 48, "root_factor": 0.0}}


@given(numbers=st.lists(st.integers(0, 4), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_shares_are_what_recalled_rows_leave(numbers: list[int], seed: int) -> None:
    """Softmax over one anchor and some rows a head, in float64; requests that recall nothing do not count."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads = len(numbers), 2
    rows = torch.randn(batch, heads, 4, generator=generator)
    anchor = torch.randn(batch, heads, generator=generator)
    shares, lse, part = [], torch.zeros(batch, heads), torch.full((batch, heads), float("-inf"))
    for i, number in enumerate(numbers):
        for h in range(heads):
            scores = torch.cat([anchor[i, h, None], rows[i, h, :number]]).double()
            lse[i, h] = scores.logsumexp(0)
            if number:
                shares.append(float(scores.softmax(0)[0]))
                part[i, h] = rows[i, h, :number].logsumexp(0)
            else:
                lse[i, h] = float("-inf") if seed % 2 else lse[i, h]
    share = AnchorShare(CPU)
    for _ in range(2):
        share.add(lse, part, torch.tensor(numbers, dtype=torch.int32))
    queries = sum(map(bool, numbers))
    expected = torch.tensor([2 * sum(shares) / heads, 2 * queries], dtype=torch.float64)
    torch.testing.assert_close(share.sums, expected, rtol=1e-5, atol=1e-6)  # log-sum-exps are float32


def test_one_by_one_and_together_measure_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnchorShare, "due", lambda self: True)
    found = []
    for together in (False, True):
        engine = Engine(settings_of("host", **FEW))
        engine.memory.anchors, engine.memory.batched = AnchorShare(CPU), together
        some, other = Request(), Request()
        engine.read(some, 300)
        engine.read(other, 200)
        for _ in range(5):
            engine.decode([some, other])
        found.append(engine.memory.anchors.sums)
    torch.testing.assert_close(found[1], found[0])
    mass, queries = found[0].tolist()
    assert queries == 10
    assert 0.1 < mass / queries < 0.9


def test_one_query_of_many_is_due() -> None:
    share = AnchorShare(CPU)
    assert sum(share.due() for _ in range(10 * module.MEASURE_EVERY)) == 10
