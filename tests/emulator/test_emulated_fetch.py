"""Fetching in CUDA C++, in the emulator, against the model in plain Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_fetch_rows import Model, host_of, ints

from hisparse.ops.fetch import HotBuffer
from hisparse.ops.fetch import cuda as twin


@pytest.fixture(autouse=True)
def fetch(emulate: Callable[..., None]) -> None:
    emulate(twin, MOVERS=3)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_slots_are_those_of_the_least_recently_used(data: st.DataObject) -> None:
    batch, budget = data.draw(st.integers(1, 2), "batch"), data.draw(st.sampled_from([9, 130]), "budget")
    sizes = tuple(budget + data.draw(st.sampled_from([0, 5, 300]), "more slots") for _ in range(batch))
    total = 6 * budget * batch
    source, bytes_ = host_of(total, 48, 40)
    hot = HotBuffer.empty(sizes, 48, total, torch.device("cpu"))
    models = [Model(sum(sizes[:b]), sizes[b]) for b in range(batch)]
    make = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    for _ in range(data.draw(st.integers(1, 6), "steps")):
        reach = data.draw(st.sampled_from([budget, 2 * budget, 6 * budget]), "rows to choose from")
        number = [data.draw(st.sampled_from([0, 1, budget]), "number") for _ in range(batch)]
        rows = torch.stack([batch * torch.randperm(reach, generator=make)[:budget] + b for b in range(batch)]).int()
        table = twin.fetch_rows(hot, source, rows, ints(number))
        for b in range(batch):
            own = rows[b, : number[b]].tolist()
            assert table[b].tolist() == [*models[b].step(own), *[0] * (budget - number[b])]
            assert torch.equal(hot.buffer[table[b, : number[b]].long()], bytes_[own])
        assert hot.counters.tolist() == [[m.found, m.read] for m in models]
        hot.check()


@pytest.mark.parametrize("row_bytes", [16, 992, 2592, 9216])
def test_rows_of_any_size(row_bytes: int) -> None:
    source, bytes_ = host_of(60, row_bytes, 7)
    hot, model = HotBuffer.empty((40,), row_bytes, 60, torch.device("cpu")), Model(0, 40)
    for start in (0, 15, 30):
        rows = list(range(start, start + 30))
        table = twin.fetch_rows(hot, source, ints([rows]), ints([30]))
        assert table[0].tolist() == model.step(rows)
        assert torch.equal(hot.buffer[table[0].long()], bytes_[rows])
