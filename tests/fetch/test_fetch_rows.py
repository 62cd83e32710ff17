"""The hot buffer against a model in plain Python: which rows lie in which slots, with the host's bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops import _cuda, fetch
from hisparse.ops.fetch import AGES, HostRows, HotBuffer, reference

triton = pytest.importorskip("hisparse.ops.fetch.triton")
BACKENDS = [pytest.param(reference, id="reference"), pytest.param(triton, id="triton")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if torch.cuda.is_available() and _cuda.can_run(None):
    from hisparse.ops.fetch import cuda

    BACKENDS.append(pytest.param(cuda, id="cuda"))


def host_of(rows: int, row_bytes: int = 48, per_segment: int = 5, seed: int = 0) -> tuple[HostRows, Tensor]:
    """Rows in segments, and the same bytes in one tensor on the CPU."""
    count = -(-rows // per_segment)
    made = torch.randint(0, 256, (count * per_segment, row_bytes), generator=torch.Generator().manual_seed(seed))
    segments = []
    for part in made.to(torch.uint8).split(per_segment):
        segment = torch.empty(part.shape, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
        segments.append(segment.copy_(part))
    return HostRows.of(segments, DEVICE), made.to(torch.uint8)


@dataclass
class Model:
    """What the buffer should do: slots of one sequence, from `first` on; the last use of each."""

    first: int
    size: int
    now: int = 0
    owner: dict[int, int] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    found: int = 0
    read: int = 0

    def step(self, rows: list[int]) -> list[int]:
        self.now += 1
        slots = {row: slot for slot, row in self.owner.items()}
        missing = [row for row in rows if row not in slots]
        for row in rows:
            if row in slots:
                self.used[slots[row]] = self.now
        every = range(self.first, self.first + self.size)
        age = {s: min(self.now - self.used[s], AGES - 1) if s in self.owner else AGES - 1 for s in every}
        oldest = sorted((s for s in every if age[s] > 0), key=lambda s: (-age[s], s))[: len(missing)]
        for row, slot in zip(missing, sorted(oldest), strict=True):
            self.owner[slot], self.used[slot], slots[row] = row, self.now, slot
        self.found += len(rows) - len(missing)
        self.read += len(missing)
        return [slots[row] for row in rows]

    def forget(self, rows: list[int]) -> None:
        self.owner = {slot: row for slot, row in self.owner.items() if row not in rows}


def merged_step(model: Model, wants: list[list[int]]) -> list[list[int]]:
    """Of sequences that share a buffer: each row once, in the order of the first entries that want it."""
    once = list(dict.fromkeys(row for want in wants for row in want))
    slot = dict(zip(once, model.step(once), strict=True))
    return [[slot[row] for row in want] for want in wants]


def ints(values: list[list[int]] | list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30)
@given(data=st.data())
def test_slots_are_those_of_the_least_recently_used(backend: ModuleType, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3), "batch")
    budget = data.draw(st.integers(1, 9), "budget")
    sizes = tuple(budget + data.draw(st.integers(0, 9), "more slots") for _ in range(batch))
    total = 60
    source, bytes_ = host_of(total)
    hot = HotBuffer.empty(sizes, source.row_bytes, total, DEVICE)
    models = [Model(sum(sizes[:b]), sizes[b]) for b in range(batch)]
    owned = [[row for row in range(total) if row % batch == b] for b in range(batch)]
    for _ in range(data.draw(st.integers(1, 8), "steps")):
        chosen = [
            data.draw(st.lists(st.sampled_from(owned[b][:14]), max_size=budget, unique=True), f"rows of {b}")
            for b in range(batch)
        ]
        rows = ints([[*row, *[7] * (budget - len(row))] for row in chosen])
        table = backend.fetch_rows(hot, source, rows, ints([len(row) for row in chosen]))
        want = [[*models[b].step(chosen[b]), *[0] * (budget - len(chosen[b]))] for b in range(batch)]
        assert table.tolist() == want
        for b, slots in enumerate(want):
            found = hot.buffer[slots[: len(chosen[b])]].cpu()
            assert torch.equal(found, bytes_[chosen[b]])
        assert hot.counters.tolist() == [[m.found, m.read] for m in models]
        hot.check()
        if data.draw(st.booleans(), "forget"):
            gone = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True), "gone")
            backend.forget_rows(hot, ints(gone))
            for model in models:
                model.forget(gone)
            hot.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ages_beyond_the_last_are_alike(backend: ModuleType) -> None:
    source, _ = host_of(40)
    hot, model = HotBuffer.empty((6,), source.row_bytes, 40, DEVICE), Model(0, 6)
    steps = [[1, 2], [3, 4], *[[5]] * (AGES + 3), [6, 7], [1, 5], [8, 9], [3, 2]]
    for rows in steps:
        entry = ints([[*rows, 0][:2]])
        assert backend.fetch_rows(hot, source, entry, ints([len(rows)]))[0, : len(rows)].tolist() == model.step(rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_numbers_within_wider_tables(backend: ModuleType) -> None:
    """Rows by entry and then by sequence, numbers as a column of a table that holds others, too."""
    source, bytes_ = host_of(40)
    hot = HotBuffer.empty((5, 5, 5), source.row_bytes, 40, DEVICE)
    rows = ints([[1, 9, 7, 7], [2, 3, 7, 7], [4, 5, 6, 8]])
    numbers = ints([[2, 4, 4], [0, 4, 4], [3, 4, 4]])
    turned = rows.T.contiguous().T
    table = backend.fetch_rows(hot, source, turned, numbers[:, 0])
    hot.check()
    assert hot.counters.tolist() == [[0, 2], [0, 0], [0, 3]]
    gathered = backend.gather_rows(source, turned, numbers[:, 0]).view(3, 4, -1)
    for b, number in enumerate([2, 0, 3]):
        here = bytes_[rows[b, :number].tolist()]
        assert torch.equal(hot.buffer[table[b, :number].long()].cpu(), here)
        assert torch.equal(gathered[b, :number].cpu(), here)
    one = torch.full((1, source.row_bytes + 4), 7, dtype=torch.uint8, device=DEVICE)[:, :-4]
    backend.store_rows(source, ints([11]), one)
    assert torch.equal(backend.gather_rows(source, ints([[11]]), None), one)


@pytest.mark.parametrize("row_bytes", [16, 48, 992, 2592, 9216])
@pytest.mark.parametrize("per_segment", [1, 7, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_any_size_move_both_ways(backend: ModuleType, row_bytes: int, per_segment: int) -> None:
    source, bytes_ = host_of(23, row_bytes, per_segment)
    rows = torch.randperm(23, generator=torch.Generator().manual_seed(1))[:20].view(2, 10)
    found = backend.gather_rows(source, rows.int().to(DEVICE), None).cpu()
    assert torch.equal(found, bytes_[rows.flatten()])
    number = [3, 9]
    found = backend.gather_rows(source, rows.int().to(DEVICE), ints(number)).view(2, 10, -1).cpu()
    for b, n in enumerate(number):
        assert torch.equal(found[b, :n], bytes_[rows[b, :n]])
    new = torch.randint(0, 256, (6, row_bytes), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    backend.store_rows(source, rows[0, :6].int().to(DEVICE), new.to(DEVICE))
    bytes_[rows[0, :6]] = new
    assert torch.equal(backend.gather_rows(source, ints([list(range(23))]), None).cpu(), bytes_[:23])


@pytest.mark.parametrize("budget", [333, 1024, 3072])
@pytest.mark.parametrize("backend", BACKENDS[2:] or [pytest.param(None, marks=pytest.mark.skip(reason="needs CUDA"))])
def test_large_budgets_in_cuda(backend: ModuleType, budget: int) -> None:
    source, bytes_ = host_of(5 * budget, 2592, 1618)
    sizes = (2 * budget, budget + 7)
    hot = HotBuffer.empty(sizes, 2592, 5 * budget, DEVICE)
    models = [Model(0, sizes[0]), Model(sizes[0], sizes[1])]
    make = torch.Generator().manual_seed(4)
    for _ in range(8):
        chosen = [2 * torch.randperm(5 * budget // 2, generator=make)[:budget] + b for b in range(2)]
        number = [budget, budget - 5]
        table = backend.fetch_rows(hot, source, torch.stack(chosen).int().to(DEVICE), ints(number)).cpu()
        for b in range(2):
            own = chosen[b][: number[b]]
            assert table[b, : number[b]].tolist() == models[b].step(own.tolist())
            assert torch.equal(hot.buffer[table[b, : number[b]].long().to(DEVICE)].cpu(), bytes_[own])
        hot.check()


@pytest.mark.parametrize(
    ("batch", "budget", "slots"), [(4, 1087, 9000), (12, 1000, 16001), (32, 2048, 131072), (2, 5, 10)]
)
@pytest.mark.parametrize("backend", BACKENDS[2:] or [pytest.param(None, marks=pytest.mark.skip(reason="needs CUDA"))])
def test_sequences_share_a_buffer_in_cuda(backend: ModuleType, batch: int, budget: int, slots: int) -> None:
    total = 2 * slots
    source, bytes_ = host_of(total, 144, 1618)
    hot, model = HotBuffer.empty((slots,), 144, total, DEVICE), Model(0, slots)
    shared, make = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.Generator().manual_seed(4)
    entries = once = 0
    for step in range(4):
        among = torch.randperm(total, generator=make)[: batch * budget * 3 // 4 + budget]
        wants = [among[torch.randperm(len(among), generator=make)[: budget - step * b]].tolist() for b in range(batch)]
        padded = [[*want, *[5] * (budget - len(want))] for want in wants]
        table = backend.fetch_shared(hot, source, ints(padded), ints([len(want) for want in wants]), shared).cpu()
        for want, found, expected in zip(wants, table, merged_step(model, wants), strict=True):
            assert found[: len(want)].tolist() == expected
            assert torch.equal(hot.buffer[found[: len(want)].long().to(DEVICE)].cpu(), bytes_[want])
        entries, once = entries + sum(map(len, wants)), once + len({row for want in wants for row in want})
        assert shared.tolist() == [(step + 1) * (batch - 1), entries - once]
        assert hot.counters.tolist() == [[model.found, model.read]]
        hot.check()


@pytest.mark.skipif(not _cuda.has_compiler(), reason="needs CUDA's Python bindings")
@pytest.mark.parametrize(("threads", "entries", "slots"), [(1024, 8, 16), (256, 1, 1), (320, 2, 5)])
@pytest.mark.parametrize("merge", [0, 1])
def test_cuda_sources_compile(threads: int, entries: int, slots: int, merge: int) -> None:
    sizes = {"THREADS": threads, "EACH_ENTRY": entries, "EACH_SLOT": slots, "AGES": AGES, "VECTORS": 162}
    sizes |= {"CLUSTER": 8, "PIECES": 1, "DEPTH": 1, "PER_SEGMENT": 1618, "MERGE": merge}
    options = [f"--define-macro={name}={value}" for name, value in sizes.items()]
    for source in ("fetch/fetch.cu", "fetch/held.cu"):
        assert _cuda.compile_source(_cuda.read_source(source), source, "sm_90", options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows_take_several_tiles(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "TILE", 128)
    source, bytes_ = host_of(2000, 16, 512)
    hot, model = HotBuffer.empty((700,), 16, 2000, DEVICE), Model(0, 700)
    make = torch.Generator().manual_seed(3)
    for _ in range(5):
        chosen = torch.randperm(1200, generator=make)[:333]
        table = backend.fetch_rows(hot, source, chosen.int()[None].to(DEVICE), ints([333]))
        assert table[0].tolist() == model.step(chosen.tolist())
        assert torch.equal(hot.buffer[table[0].long()].cpu(), bytes_[chosen])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=3), st.data())
def test_all_rows_of_a_buffer(backend: ModuleType, sizes: list[int], data: st.DataObject) -> None:
    hot = HotBuffer.empty(tuple(sizes), 16, 1000, DEVICE)
    used = data.draw(st.lists(st.integers(0, sum(sizes) - 1), unique=True))
    hot.owner[used] = torch.arange(len(used), dtype=torch.int32, device=DEVICE)
    table, number = backend.held_rows(hot, 320)
    start = 0
    for b, size in enumerate(sizes):
        want = sorted(slot for slot in used if start <= slot < start + size)
        assert table[b, : number[b]].tolist() == want
        start += size


def test_what_a_buffer_holds_stays_while_rows_are_added() -> None:
    source, _ = host_of(40)
    hot = HotBuffer.empty((4,), source.row_bytes, 10, DEVICE)
    fetch.fetch_rows(hot, source, ints([[9, 3]]), ints([2]))
    grown = hot.with_rows(40)
    fetch.fetch_rows(grown, source, ints([[39, 9]]), ints([2]))
    assert grown.counters.tolist() == [[1, 3]]
    assert grown.with_rows(30) is grown
    assert grown.nbytes == 4 * (48 + 4 + 4) + 40 * 4 + 2 * 4 + 4 + 16


def test_what_does_not_fit_is_refused() -> None:
    source, _ = host_of(40)
    hot = HotBuffer.empty((4, 9), source.row_bytes, 40, DEVICE)
    rows, number = ints([[0] * 5] * 2), ints([5, 5])
    with pytest.raises(FormatError, match="a sequence has 4 slots in the hot buffer, but one step may use 5 rows"):
        fetch.fetch_rows(hot, source, rows, number)
    with pytest.raises(FormatError, match=r"rows are torch.int64 .*give int32 \[2, budget\]"):
        fetch.fetch_rows(hot, source, rows.long(), number)
    with pytest.raises(FormatError, match=r"number is torch.int32 \[1\]; give int32 \[2\]"):
        fetch.fetch_rows(hot, source, rows[:, :4], number[:1])
    with pytest.raises(FormatError, match="rows of 32 bytes, the host of 48"):
        fetch.fetch_rows(HotBuffer.empty((9, 9), 32, 40, DEVICE), source, rows, number)
    odd, _ = host_of(4, 24)
    with pytest.raises(FormatError, match="rows of 24 bytes; they are read 16 at a time"):
        fetch.gather_rows(odd, rows, None)
    with pytest.raises(FormatError, match=r"pages are torch.uint8 \[3, 32\] for rows \[3\]; give uint8 \[n, 48\]"):
        fetch.store_rows(source, ints([1, 2, 3]), torch.zeros(3, 32, dtype=torch.uint8))
    with pytest.raises(FormatError, match=r"rows are torch.int64 \[1\]; give int32 \[n\]"):
        fetch.forget_rows(hot, torch.zeros(1, dtype=torch.int64))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA")
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_captured_graph_fetches_what_its_inputs_say(backend: ModuleType) -> None:
    source, bytes_ = host_of(500, 2592, 64)
    hot, model = HotBuffer.empty((64,), 2592, 500, DEVICE), Model(0, 64)
    rows, number = ints([list(range(32))]), ints([32])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backend.fetch_rows(hot, source, rows, number)
        model.step(list(range(32)))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table = backend.fetch_rows(hot, source, rows, number)
    make = torch.Generator().manual_seed(0)
    for count in (32, 0, 5, 31, 32):
        chosen = torch.randperm(500, generator=make)[:32]
        rows.copy_(chosen[None])
        number.fill_(count)
        graph.replay()
        slots = table[0, :count].tolist()
        assert slots == model.step(chosen[:count].tolist())
        assert torch.equal(hot.buffer[slots].cpu(), bytes_[chosen[:count]])
