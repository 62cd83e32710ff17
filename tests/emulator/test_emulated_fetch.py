"""Rows from the host in CUDA C++, in the emulator, against the model in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("hisparse.ops.fetch.triton")
from test_fetch_rows import Model, host_of, ints, merged_step

from emulator import behind
from hisparse.config import HiSparseConfig
from hisparse.integrations.vllm import hot as hot_module
from hisparse.integrations.vllm.hot import Claims, HotRows, HotSize, record_rows
from hisparse.integrations.vllm.layout import choose_layout
from hisparse.ops.fetch import AGES, HotBuffer
from hisparse.ops.fetch import cuda as twin

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fetch(emulate: Any) -> None:
    emulate(twin)


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
@pytest.mark.parametrize(
    ("budget", "more", "row_bytes", "per_segment"),
    [(9, (0, 5), 48, 5), (300, (7, 250), 2592, 161), (20, (40, 3), 9216, 7), (5, (3,), 16400, 2)],
)
def test_slots_are_those_of_the_least_recently_used(
    budget: int, more: tuple[int, ...], row_bytes: int, per_segment: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if early:
        monkeypatch.setattr(twin, "MANY", 1)  # fewer programs a sequence where there are two
    batch, total = len(more), 4 * budget
    source, bytes_ = host_of(total, row_bytes, per_segment)
    sizes = tuple(budget + n for n in more)
    hot = HotBuffer.empty(sizes, row_bytes, total, CPU)
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
    hot, model = HotBuffer.empty((6,), source.row_bytes, 40, CPU), Model(0, 6)
    for rows in [[1, 2], [3, 4], *[[5]] * (AGES + 3), [6, 7], [1, 5], [8, 9], [3, 2]]:
        entry = ints([[*rows, 0][:2]])
        assert twin.fetch_rows(hot, source, entry, ints([len(rows)]))[0, : len(rows)].tolist() == model.step(rows)


SHAPES = [(1, 32, 32, 8), (2, 32, 64, 8), (4, 64, 64, 184), (8, 32, 32, 16)]
"""Programs, fewest and most threads, vectors that a warp brings at once."""


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[2]}")
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_sequences_share_a_buffer(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """Many entries and slots a thread, few programs, rows in pieces."""
    cluster, least, most, piece = shape
    for name, value in {"CLUSTER": cluster, "LEAST": least, "THREADS": most, "PIECE": piece}.items():
        monkeypatch.setattr(twin, name, value)
    batch, budget = data.draw(st.sampled_from([(2, 9), (3, 61), (5, 30), (7, 1)]), "batch and budget")
    slots = batch * budget + data.draw(st.sampled_from([0, 1, 40, 77]), "more slots")
    row_bytes = data.draw(st.sampled_from([16, 80, 400]), "bytes of a row")
    total = 2 * slots + 3
    source, bytes_ = host_of(total, row_bytes, 7)
    hot, model = HotBuffer.empty((slots,), row_bytes, total, CPU), Model(0, slots)
    shared, expected = ints([0, 0]).long(), [0, 0]
    make = torch.Generator().manual_seed(data.draw(st.integers(0, 9), "seed"))
    for _ in range(4):
        among = torch.randperm(total, generator=make)[: max(budget, data.draw(st.integers(1, total), "rows wanted"))]
        wants = [
            among[torch.randperm(len(among), generator=make)[: data.draw(st.integers(0, budget), "number")]].tolist()
            for _ in range(batch)
        ]
        rows, number = ints([[*want, *[5] * (budget - len(want))] for want in wants]), ints([len(w) for w in wants])
        behind(rows, number)
        early = data.draw(st.booleans(), "early")
        table = twin.fetch_shared(hot, source, rows, number, shared, early=early).tolist()
        assert table == [[*slots, *[0] * (budget - len(slots))] for slots in merged_step(model, wants)]
        for want, slot in zip(wants, table, strict=True):
            assert torch.equal(hot.buffer[slot[: len(want)]], bytes_[want])
        every = sum(map(len, wants))
        expected[0] += sum(map(bool, wants)) - 1
        expected[1] += every - len({row for want in wants for row in want})
        assert shared.tolist() == expected
        assert hot.counters.tolist() == [[model.found, model.read]]
        assert int(hot.clock) == model.now
        hot.check()


def test_more_rows_than_slots_do_no_harm() -> None:
    """What has no slot is not brought; what was in the buffer and is wanted stays."""
    source, bytes_ = host_of(100, 48, 7)
    hot, shared = HotBuffer.empty((20,), 48, 100, CPU), torch.zeros(2, dtype=torch.int64)
    for wants in ([list(range(12)), list(range(6, 14))], [list(range(10, 30)), list(range(20, 40))]):
        rows = ints([[*want, *[0] * (20 - len(want))] for want in wants])
        table = twin.fetch_shared(hot, source, rows, ints([len(want) for want in wants]), shared)
        hot.check()
    held = {row: slot for slot, row in enumerate(hot.owner.tolist())}
    assert sorted(held) == [*range(10, 30)]
    assert table.tolist() == [[held.get(row, 0) for row in want] for want in wants]
    assert torch.equal(hot.buffer, bytes_[hot.owner.long()])


def test_a_batch_of_requests_takes_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer of vLLM's requests: rows by their records, searched as far as the batch is large."""
    monkeypatch.setattr(hot_module, "backend_for", lambda *_: "cuda")
    layout = choose_layout(HiSparseConfig(), 2, 64, torch.float32, 1024, 64)
    blocks, budget, lead = 6, 9, layout.rows_per_block - layout.host_rows
    pool = torch.randint(0, 256, (layout.host_lead + blocks * layout.host_rows, layout.row.page_bytes)).to(torch.uint8)
    source, records = record_rows(layout, pool, blocks, CPU), blocks * layout.rows_per_block
    hot = HotRows(HotSize(60, 3, 0, records), layout, 2 * budget, 3, Claims(records, CPU), CPU)
    make, asked = torch.Generator().manual_seed(1), 0
    for requests in (2, 3, 2, 3):
        rows = torch.stack(
            [torch.randperm(blocks * layout.host_rows, generator=make)[:budget] for _ in range(requests)]
        )
        rows[1, 2:5] = rows[0, :3]
        rows[1] = rows[1, torch.randperm(budget, generator=make)]
        rows[1, :] = torch.tensor(list(dict.fromkeys([*rows[1].tolist(), *range(99)]))[:budget])  # each once
        wanted = rows // layout.host_rows * layout.rows_per_block + lead + rows % layout.host_rows
        number = ints([budget - i for i in range(requests)])
        behind(number)
        table = hot.bring(source, wanted.int(), number, early=True)
        for row, slot, n in zip(rows, table, number.tolist(), strict=True):
            assert torch.equal(hot.all.buffer[slot[:n].long()], pool[layout.host_lead :][row[:n]])
        asked += int(number.sum())
        hot.all.check()
    found, read, shared, queries = hot.counts().tolist()
    assert found + read + shared == asked
    assert shared >= 3
    assert queries == 10
