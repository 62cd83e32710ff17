"""The hot buffer that all requests of a batch share, without an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_memory import DIM, HEADS, QUERIES, Engine, Request, settings_of
from torch import Tensor

from hisparse.config import HiSparseConfig, SelectionConfig
from hisparse.integrations.vllm import hot as module
from hisparse.integrations.vllm.hot import (
    Claims,
    HotRows,
    HotSize,
    hand_out,
    hot_size,
    locate_rows,
    merge_rows,
    record_rows,
    why_no_buffer,
)
from hisparse.integrations.vllm.layout import choose_layout
from hisparse.integrations.vllm.memory import LayerMemory
from hisparse.integrations.vllm.step import EVERYTHING, row_budget
from hisparse.ops.fetch import HostRows, gather_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = choose_layout(HiSparseConfig(), HEADS, DIM, torch.float32, 1024, 64)
BLOCKS = 6
CPU = torch.device("cpu")


@pytest.fixture(params=["reference", "triton", *(["cuda"] if DEVICE.type == "cuda" else [])])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "reference":
        pytest.importorskip("hisparse.integrations.vllm.kernels")
    monkeypatch.setenv("HISPARSE_BACKEND", request.param)
    return str(request.param)


LEAD = LAYOUT.rows_per_block - LAYOUT.host_rows
assert LEAD > 0, "blocks of these tests have records that are no rows"


def records_of(rows: list[int]) -> list[int]:
    """Records of rows of the host pool: a block's rows are the last of its records."""
    return [row // LAYOUT.host_rows * LAYOUT.rows_per_block + LEAD + row % LAYOUT.host_rows for row in rows]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Rows of the host pool that each request of a batch wants, each once, and how many it may want."""
    total = BLOCKS * LAYOUT.host_rows
    budget = draw(st.integers(1, 9))
    some = st.sampled_from(range(0, total, max(1, total // 12)))
    wanted = st.lists(some, max_size=budget, unique=True)
    return draw(st.lists(wanted, min_size=2, max_size=5)), budget


def tables(rows: list[list[int]], budget: int) -> tuple[Tensor, Tensor]:
    """Records int32 [B, budget] with something beyond the number, and the number int32 [B], both columns of one
    table."""
    padded = [[*records_of(row), *[3] * (budget - len(row)), len(row), 1] for row in rows]
    both = torch.tensor(padded, dtype=torch.int32, device=DEVICE)
    return both[:, :budget], both[:, budget]


@settings(max_examples=40)
@given(batch=batches())
@pytest.mark.usefixtures("backend")
def test_a_batch_lists_every_row_once(batch: tuple[list[list[int]], int]) -> None:
    rows, budget = batch
    records, number = tables(rows, budget)
    claims = torch.full((BLOCKS * LAYOUT.rows_per_block,), 12345, dtype=torch.int32, device=DEVICE)
    shared = torch.tensor([5, 7], device=DEVICE)
    merged = merge_rows(records, number, claims, shared, len(rows) * budget)
    rows = [records_of(request) for request in rows]
    every = {row for request in rows for row in request}
    assert int(merged.number) == len(every)
    listed = merged.rows[0, : len(every)].tolist()
    assert sorted(listed) == sorted(every)
    names = 1000 + merged.rows  # slots, were they fetched
    table = hand_out(names, merged.rank, records, number, claims).tolist()
    for i, request in enumerate(rows):
        assert table[i][: len(request)] == [1000 + row for row in request]
    entries = sum(map(len, rows))
    assert shared.tolist() == [5 + sum(map(bool, rows)) - 1, 7 + entries - len(every)]


@settings(max_examples=40)
@given(batch=batches(), on_host=st.booleans())
@pytest.mark.usefixtures("backend")
def test_rows_are_where_they_lie_without_a_buffer(batch: tuple[list[list[int]], int], on_host: bool) -> None:
    rows, budget = batch
    records, number = tables(rows, budget)
    counted, queries = (torch.tensor(x, device=DEVICE) for x in (1 << 40, 7))
    table = locate_rows(LAYOUT if on_host else None, records, number, counted, queries).tolist()
    for found, wanted in zip(table, rows, strict=True):
        assert found[: len(wanted)] == (wanted if on_host else records_of(wanted))
    assert int(counted) == (1 << 40) + sum(map(len, rows))
    assert int(queries) == 7 + sum(map(bool, rows))


def small_buffer(slots: int, budget: int, requests: int) -> tuple[HotRows, HostRows, Tensor]:
    """A buffer, its source, and the rows of the host pool in that."""
    shape = (LEAD + BLOCKS * LAYOUT.host_rows, LAYOUT.row.page_bytes)
    made = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
    pool = torch.empty(made.shape, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda").copy_(made)
    records = BLOCKS * LAYOUT.rows_per_block
    hot = HotRows(HotSize(slots, requests, 0, records), LAYOUT, 2 * budget, requests, Claims(records, DEVICE), DEVICE)
    return hot, record_rows(LAYOUT, pool, BLOCKS, DEVICE), pool[LEAD:]


@settings(max_examples=30)
@given(steps=st.lists(batches(), min_size=1, max_size=6), gone=st.lists(st.integers(0, 30), max_size=5, unique=True))
@pytest.mark.usefixtures("backend")
def test_slots_hold_the_rows_that_were_asked_for(steps: list[tuple[list[list[int]], int]], gone: list[int]) -> None:
    """Whoever asks, alone or together, for rows of its own or shared ones, written anew in between or not."""
    hot, source, host = small_buffer(5 * 9, 9, 5)
    asked = queries = 0
    for number, (rows, budget) in enumerate(steps):
        for requests in (rows, rows[:1]):
            records, count = tables(requests, budget)
            table = hot.bring(source, records, count)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            for i, request in enumerate(requests):
                assert torch.equal(hot.all.buffer[table[i, : len(request)].long()].cpu(), host[request])
            asked += sum(map(len, requests))
            queries += max(1, sum(map(bool, requests))) if len(requests) == 1 else sum(map(bool, requests))
            hot.all.check()
        rewritten = torch.tensor(gone, dtype=torch.int64)
        host[rewritten] = number
        hot.forget(torch.tensor(records_of(gone), dtype=torch.int32, device=DEVICE))
        hot.all.check()
    found, read, shared, counted = hot.counts().tolist()
    assert found + read + shared == asked
    assert counted == queries


@pytest.mark.usefixtures("backend")
def test_a_small_batch_finds_what_a_large_one_left() -> None:
    """It makes room among the first slots, and uses rows wherever they are."""
    hot, source, _ = small_buffer(40, 4, 10)
    crowd = [[4 * i + j for j in range(4)] for i in range(10)]
    hot.bring(source, *tables(crowd, 4))
    for request in crowd:
        hot.bring(source, *tables([request], 4))
    assert hot.counts().tolist() == [40, 40, 0, 20]
    before = hot.all.owner.tolist()  # in whatever order the batch's rows came
    assert sorted(before) == sorted(records_of([row for request in crowd for row in request]))
    hot.bring(source, *tables([[50, 51, 52, 53]], 4))
    assert set(hot.all.owner[:8].tolist()) > set(records_of([50, 51, 52, 53]))
    assert hot.all.owner[8:].tolist() == before[8:]


def test_rows_have_the_numbers_of_their_records() -> None:
    """Whatever the layout: no two records share a row, and both ways to a row lead there."""
    for tokens, config in ((64, HiSparseConfig()), (256, HiSparseConfig(selection={"row_size": 8}))):
        layout = choose_layout(config, HEADS, DIM, torch.float32, 1024, tokens)
        records = torch.arange(3)[:, None] * layout.rows_per_block + layout.rows_per_block - 1
        records = (records - torch.arange(layout.other.rows)).flatten()  # row j of block b: see `layout`
        ids = layout.host_id(records)
        assert sorted(ids.tolist()) == list(range(3 * layout.host_rows))
        pool = torch.randint(0, 256, (layout.host_lead + 3 * layout.host_rows, layout.row.page_bytes)).to(torch.uint8)
        found = gather_rows(record_rows(layout, pool, 3, CPU), records.int()[None])
        assert torch.equal(found, pool[layout.host_lead :][ids])


@given(
    memory=st.integers(0, 1 << 34),
    requests=st.integers(1, 1024),
    factor=st.sampled_from([0.0, 1.0, 2.0, 7.5]),
    budget=st.integers(1, 3072),
)
def test_the_buffer_keeps_to_its_share(memory: int, requests: int, factor: float, budget: int) -> None:
    size = hot_size(SelectionConfig(hot_factor=factor), LAYOUT, budget, requests, memory)
    assert size.bytes <= memory / 32
    assert size.slots <= factor * budget * requests
    assert (size.slots == 0) == (size.requests == 0)
    if size.slots:
        assert size.requests <= requests
        assert size.requests * budget <= size.slots
        each = int(factor * budget)
        hot = HotRows(size._replace(rows=1), LAYOUT, each, requests, Claims(1, CPU), torch.device("meta"))
        assert all(min(n * budget, size.slots) <= slots <= size.slots for n, slots in enumerate(hot.searched, 1))


@pytest.mark.parametrize(("heads", "dim", "context", "always"), [(3, 64, 8192, True), (4, 128, 131072, False)])
def test_where_there_is_no_buffer_it_is_said_why(heads: int, dim: int, context: int, always: bool) -> None:
    config = HiSparseConfig()
    layout = choose_layout(config, heads, dim, torch.bfloat16, context)
    budget = row_budget(layout, config.selection, context)
    slots = [hot_size(config.selection, layout, budget, 1, memory << 30).slots for memory in (0, 100)]
    assert slots[0] == 0
    assert (slots[1] == 0) is always
    what, share, remedy = why_no_buffer(layout, context)
    assert share == 32
    assert ("any memory" in remedy) is always
    assert (str(context) in what) is not always


class BatchedEngine(Engine):
    """Requests decode together, through a hot buffer of `requests` times what one recalls."""

    def __init__(self, config: HiSparseConfig, requests: int) -> None:
        super().__init__(config)
        self.budget = row_budget(self.layout, config.selection, 1024)
        size = HotSize(2 * requests * self.budget, requests, 0, 7)  # fewer rows than there are: it has to grow
        self.hot = HotRows(size, self.layout, 2 * self.budget, 4, Claims(7, CPU), CPU)
        blocks = torch.zeros(200, 1, 1, self.layout.block_bytes, dtype=torch.uint8)
        arguments = (self.layout, config, blocks, None, torch.arange(DIM), DIM**-0.5, self.budget, True, self.hot)
        self.memory = LayerMemory(*arguments)

    def both(self, requests: list[Request]) -> tuple[Tensor, Tensor, Tensor]:
        """A step of all requests through the buffer, the same without it, and dense attention."""
        seen: list[Tensor] = []
        batch = self.memory.decode_batch

        def twice(q: Tensor, step: object, out: Tensor | None = None) -> Tensor:
            found = batch(q, step)  # type: ignore[arg-type]
            self.memory.hot = None
            seen.append(batch(q, step))  # type: ignore[arg-type]
            self.memory.hot = self.hot
            return found

        self.memory.decode_batch = twice  # type: ignore[method-assign,assignment]
        found, expected = self.decode(requests)
        self.memory.decode_batch = batch  # type: ignore[method-assign]
        return found, seen[0], expected


FEW = {"selection": {"min_tokens": 48, "root_factor": 0.0}}


def rewrite(engine: BatchedEngine) -> list[tuple[Tensor, Tensor]]:
    """A request decodes, ends, and another one gets its blocks; what the second sees with the buffer and without."""
    first = Request()
    engine.read(first, 300)
    for _ in range(8):
        engine.both([first])
    engine.free += first.pages[::-1]  # handed out next, in the same order
    second = Request()
    engine.read(second, 300)
    assert second.pages[:4] == first.pages[:4]
    return [engine.both([second])[:2] for _ in range(8)]


def test_a_block_written_anew_is_not_read_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block goes back to the pool with its rows in the buffer, as evicted blocks of the prefix cache do."""
    for found, expected in rewrite(BatchedEngine(settings_of("host", **FEW), 2)):
        assert torch.equal(found, expected)
    monkeypatch.setattr(module.HotRows, "forget", lambda self, rows: None)
    stale = rewrite(BatchedEngine(settings_of("host", **FEW), 2))
    assert not all(torch.equal(found, expected) for found, expected in stale), "the test would see nothing"


def test_requests_that_share_blocks_share_rows() -> None:
    engine = BatchedEngine(settings_of("host", **FEW), 3)
    owner, other = Request(), Request()
    engine.read(owner, 330)
    engine.read(other, 200)
    heir = Request(k=[torch.cat(owner.k)[:320]], v=[torch.cat(owner.v)[:320]], pages=owner.pages[:5], past=320)
    heir.ring = [0] * 5
    for _ in range(20):
        found, unbuffered, _ = engine.both([owner, heir, other])
        assert torch.equal(found, unbuffered)
        engine.hot.all.check()
    hits, misses, shared, queries = engine.hot.counts().tolist()
    assert hits > 0
    assert shared > 0
    assert misses > 0
    assert queries == 60


@given(
    wants=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), min_size=1, max_size=6),
    most=st.integers(1, 2000),
)
def test_a_step_wants_no_more_rows_than_there_are_slots(wants: list[tuple[int, int]], most: int) -> None:
    """And otherwise what it wanted; each request its share."""
    engine = Engine(settings_of("host"))
    step = engine.step([Request() for _ in wants], [1] * len(wants))
    wanted, count = (torch.tensor(x, dtype=torch.int32) for x in zip(*wants, strict=True))
    limited = replace(step, wanted=wanted, row_count=count).limited(most)
    there = torch.minimum(wanted, count)
    if int(there.sum()) <= most:
        assert torch.equal(limited.wanted, there)
    else:
        assert most - len(wants) <= int(limited.wanted.sum()) <= most
        exact = there.double() * most / there.sum()
        assert bool(((exact - limited.wanted) <= 1 + 1e-9).all())


@given(
    wants=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 2500)), min_size=1, max_size=6),
    most=st.integers(1, 9000),
    each=st.integers(0, 2000),
)
def test_few_rows_are_all_wanted(wants: list[tuple[int, int]], most: int, each: int) -> None:
    """Where all requests' few rows are few together; else it is as if no request had few."""
    engine = Engine(settings_of("host"))
    step = engine.step([Request() for _ in wants], [1] * len(wants))
    wanted, count = (torch.tensor(x, dtype=torch.int32) for x in zip(*wants, strict=True))
    step = replace(step, wanted=wanted, row_count=count)
    all_of_few = [n if n <= each else min(w, n) for w, n in wants]
    limited = step.limited(most, each).wanted
    if sum(all_of_few) <= min(most, EVERYTHING):
        assert limited.tolist() == all_of_few
    else:
        assert torch.equal(limited, step.limited(most).wanted)


def test_more_requests_than_the_buffer_was_made_for() -> None:
    """They recall less each, and what they recall is right."""
    engine = BatchedEngine(settings_of("host", selection={"min_tokens": 96, "root_factor": 0.0}), 1)
    requests = [Request() for _ in range(5)]
    for request in requests:
        engine.read(request, 200)
    make, slots = engine.step, engine.hot.size.slots
    engine.step = lambda requests, new: make(requests, new).limited(slots)  # type: ignore[method-assign]
    for _ in range(3):
        found, unbuffered, _ = engine.both(requests)
        assert torch.equal(found, unbuffered)
        assert found.shape == (5, QUERIES, DIM)
    hits, misses, shared, _ = engine.hot.counts().tolist()
    assert hits > 0
    assert 3 * (slots - 5) <= hits + misses + shared <= 3 * slots < 3 * 5 * engine.budget


@pytest.mark.usefixtures("backend")
def test_many_rows_of_a_batch_stay_while_they_are_wanted() -> None:
    """More than one program of the kernels takes at once: the same rows again are all found, and some others beside."""
    blocks, budget = 400, 1500
    pool = torch.randint(0, 256, (LEAD + blocks * LAYOUT.host_rows, LAYOUT.row.page_bytes)).to(torch.uint8)
    host = torch.empty(pool.shape, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda").copy_(pool)
    source, records = record_rows(LAYOUT, host, blocks, DEVICE), blocks * LAYOUT.rows_per_block
    hot = HotRows(HotSize(9000, 3, 0, records), LAYOUT, 2 * budget, 3, Claims(records, DEVICE), DEVICE)
    each = blocks * LAYOUT.host_rows // 3
    rows = [[each * i + j for j in torch.randperm(each)[: budget - 7].tolist()] for i in range(3)]
    others = [next(j for j in range(each * i, each * (i + 1)) if j not in rows[i]) for i in range(3)]
    moved = [[*request[10:], other] for request, other in zip(rows, others, strict=True)]
    for wants, misses in ((rows, 3 * (budget - 7)), (rows, 0), (moved, 3), (rows, 0)):
        wanted, number = tables(wants, budget)
        before = int(hot.counts()[1])
        table = hot.bring(source, wanted, number)
        assert int(hot.counts()[1]) - before == misses
        for i, request in enumerate(wants):
            assert torch.equal(hot.all.buffer[table[i, : len(request)].long()].cpu(), host[LEAD:][request])
        hot.all.check()
