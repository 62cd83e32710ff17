"""Rows from the host in CUDA C++, in the emulator, against the model in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("hisparse.ops.fetch.triton")
from test_fetch_rows import Model, host_of, ints

from emulator import behind
from hisparse.ops.fetch import AGES, HotBuffer
from hisparse.ops.fetch import cuda as twin


@pytest.fixture(autouse=True)
def _fetch(emulate: Any) -> None:
    emulate(twin)


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
@pytest.mark.parametrize(
    ("budget", "more", "row_bytes", "per_segment"),
    [(9, (0, 5), 48, 5), (300, (7, 250), 2592, 161), (20, (40, 3), 9216, 7)],
)
def test_slots_are_those_of_the_least_recently_used(
    budget: int, more: tuple[int, ...], row_bytes: int, per_segment: int, early: bool
) -> None:
    batch, total = len(more), 4 * budget
    source, bytes_ = host_of(total, row_bytes, per_segment)
    sizes = tuple(budget + n for n in more)
    hot = HotBuffer.empty(sizes, row_bytes, total, torch.device("cpu"))
    models = [Model(sum(sizes[:b]), sizes[b]) for b in range(batch)]
    make = torch.Generator().manual_seed(budget)
    for step in range(6):
        chosen = [batch * torch.randperm(total // batch, generator=make)[:budget] + b for b in range(batch)]
        number = [budget if (step + b) % 3 else budget // 2 for b in range(batch)]
        rows, count = torch.stack(chosen).int(), ints(number)
        behind(rows, count)
        table = twin.fetch_rows(hot, source, rows, count, early=early)
        for b in range(batch):
            own = chosen[b][: number[b]]
            assert table[b, : number[b]].tolist() == models[b].step(own.tolist())
            assert not table[b, number[b] :].any()
            assert torch.equal(hot.buffer[table[b, : number[b]].long()], bytes_[own])
        slots, held = twin.held_rows(hot, sum(sizes))
        for b in range(batch):
            assert slots[b, : held[b]].tolist() == sorted(models[b].owner)
        assert hot.counters.tolist() == [[model.found, model.read] for model in models]
        hot.check()


def test_ages_beyond_the_last_are_alike() -> None:
    source, _ = host_of(40)
    hot, model = HotBuffer.empty((6,), source.row_bytes, 40, torch.device("cpu")), Model(0, 6)
    for rows in [[1, 2], [3, 4], *[[5]] * (AGES + 3), [6, 7], [1, 5], [8, 9], [3, 2]]:
        entry = ints([[*rows, 0][:2]])
        assert twin.fetch_rows(hot, source, entry, ints([len(rows)]))[0, : len(rows)].tolist() == model.step(rows)
