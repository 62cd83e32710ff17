"""Decode steps of a whole batch: what the tables say, what layers store, what the hot buffer may take."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layer_store import CALIBRATED, CPU, DIM, HEADS, by_parity, check, sequence_of

from hisparse.cache import pools
from hisparse.cache.decode import RecallRows, add_recent, batched, bring_rows, choose_rows, recall_step
from hisparse.cache.geometry import HOT_SHARE, Geometry, rounded
from hisparse.cache.layer import LayerStore
from hisparse.cache.pools import HostPool, PageIds
from hisparse.cache.sequence import View
from hisparse.cache.tables import Tables
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, FormatError
from hisparse.ops.decode import Pages
from hisparse.ops.fetch import HotBuffer
from hisparse.ops.pack import pack_pages
from hisparse.ops.scan import Chosen
from hisparse.ops.sketch import build_sketch
from hisparse.vtq.format import PageFormat


@settings(max_examples=40)
@given(
    prefill=st.lists(st.integers(0, 90), min_size=1, max_size=3).filter(any),
    steps=st.integers(1, 40),
    page=st.sampled_from([1, 4, 8]),
    row=st.sampled_from([1, 4]),
    evict=st.sampled_from(["host", "drop", "none"]),
    rows=st.sampled_from(["host", "device"]),
    interval=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_steps_store_what_chunks_store(
    prefill: list[int], steps: int, page: int, row: int, evict: str, rows: str, interval: int, dtype: torch.dtype
) -> None:
    config = HiSparseConfig(
        tlif={"prefix_length": 8}, vtq={"page_size": page}, evict=evict,
        selection={"row_size": row, "rows": rows, "min_tokens": 12, "root_factor": 0.0, "scan_interval": interval},
    )  # fmt: skip
    batch, geometry = len(prefill), Geometry(1, HEADS, DIM, dtype, config, batched=True)
    tables = Tables(batch, CPU)
    store = LayerStore(geometry, PageIds(), PageIds(), CALIBRATED, torch.arange(DIM), CPU, tables)
    make = torch.Generator().manual_seed(sum(prefill))
    q, k, v = (torch.randn(batch, HEADS * g, max(prefill) + steps, DIM, generator=make).to(dtype) for g in (3, 1, 1))
    sequences = [sequence_of(store) for _ in prefill]
    views = [s.view(CPU) for s in sequences]
    chunk = [
        s.extend(np.arange(n, dtype=np.float32), by_parity) if n else None
        for s, n in zip(sequences, prefill, strict=True)
    ]
    tables.extend(views, chunk)
    for b, commit in enumerate(chunk):
        if commit is not None:
            store.commit(*(x[b, :, : prefill[b]] for x in (q, k, v)), b, batch, 0, commit)
    for step in range(steps):
        views = [s.view(CPU) for s in sequences]
        commits = [s.extend(np.array([s.length], np.float32), by_parity) for s in sequences]
        now = tables.step(geometry, views, commits, [0 if evict != "host" else 40] * batch, step % interval == 0)
        assert store.can_step(batch, now)
        here = [torch.stack([x[b, :, n + step : n + step + 1] for b, n in enumerate(prefill)]) for x in (q, k, v)]
        out = store.attend_step(*here, now, 0.2)
        assert out.shape == (batch, 3 * HEADS, 1, DIM)
        assert bool(out.isfinite().all())
    tables.check([s.pages for s in sequences], [s.rows for s in sequences])
    check(store, [(s, q[b], k[b], v[b]) for b, s in enumerate(sequences)])
    assert int(tables.faults) == 0
    if store.decode is not None and store.decode.hot is not None:
        store.decode.hot.check()


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=10), st.sampled_from([16, 48]), st.integers(1, 9))
def test_a_host_pool_keeps_what_was_written_while_it_grows(counts: list[int], page_bytes: int, segment: int) -> None:
    before, pools.SEGMENT_BYTES = pools.SEGMENT_BYTES, segment * page_bytes
    try:
        ids, pool, written = PageIds(), HostPool(page_bytes, CPU), {}
    finally:
        pools.SEGMENT_BYTES = before
    make = torch.Generator().manual_seed(page_bytes)
    for count in counts:
        taken = ids.take(count)
        pool.ensure(ids.capacity)
        pages = torch.randint(0, 256, (count, page_bytes), dtype=torch.uint8, generator=make)
        pool.write(torch.tensor(taken), pages)
        written.update(zip(taken, pages, strict=True))
        assert ids.capacity <= len(pool) < ids.capacity + segment
        assert pool.nbytes == len(pool) * page_bytes
    order = torch.tensor(sorted(written, key=lambda i: -i))
    want = torch.stack([written[i] for i in order.tolist()])
    for same in (pool, copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        assert torch.equal(same.read(order, CPU), want)
        assert same.read(order[:0], CPU).shape == (0, page_bytes)


@settings(max_examples=200)
@given(
    context=st.integers(200, 2_000_000),
    capacity=st.floats(1.0, 20.0),
    factor=st.sampled_from([0.0, 1.0, 2.0, 4.0]),
    bits=st.sampled_from([1, 2]),
    device_rows=st.booleans(),
)
def test_a_hot_buffer_holds_a_step_or_is_not_there(
    context: int, capacity: float, factor: float, bits: int, device_rows: bool
) -> None:
    selection = {"hot_factor": factor, "sketch_bits": bits, "rows": "device" if device_rows else "host"}
    geometry = Geometry(
        4, 2, 64, torch.bfloat16, HiSparseConfig(selection=selection, budget={"capacity": capacity}), batched=True
    )
    graduated, overhead = context - 140, geometry.slots * geometry.slot_bytes
    found = geometry.hot_rows(context, graduated, overhead)
    wanted = min(-(-geometry.config.selection.budget(context) // 4), graduated // 4)
    if not geometry.hot:
        assert found == 0
        return
    assert found == 0 or rounded(wanted) <= found <= max(factor * wanted, rounded(wanted))
    spare = context * geometry.dense_token_bytes / capacity - overhead - graduated * geometry.aside_token_bytes
    assert found * geometry.hot_row_bytes <= max(0.0, HOT_SHARE * spare)
    roomy = Geometry(4, 2, 64, torch.bfloat16, HiSparseConfig(selection=selection, budget={"capacity": None}), True)
    assert roomy.hot_rows(context, graduated, overhead) >= max(found, wanted)
    assert Geometry(4, 2, 64, torch.bfloat16, geometry.config).hot_rows(context, graduated, overhead) == 0


def test_sizes_of_hot_buffers_change_seldom() -> None:
    tables = Tables(2, CPU)
    assert tables.hot_sizes([0, 0], [10, 20]) == (0, 0)
    assert tables.hot_sizes([100, 0], [10, 20]) == (100, 64)
    assert tables.hot_sizes([110, 10], [60, 64]) == (100, 64)
    assert tables.hot_sizes([110, 10], [60, 65]) == (110, 128)
    assert tables.hot_sizes([200, 110], [60, 65]) == (200, 128)
    assert tables.hot_sizes([0, 0], [60, 65]) == (0, 0)


def test_a_hot_factor_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hot_factor = 0.5: the hot buffer must hold .*use 1 or more, or 0"):
        HiSparseConfig(selection={"hot_factor": 0.5})


def test_batches_are_decoded_at_once_where_kernels_can_read_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def geometry(**config: Any) -> Geometry:
        return Geometry(1, 2, 64, torch.bfloat16, HiSparseConfig(**config))

    monkeypatch.delenv("HISPARSE_BACKEND", raising=False)
    assert not batched(CPU, geometry())
    assert batched(torch.device("cuda"), geometry())
    assert not batched(torch.device("cuda"), geometry(vtq={"page_size": 5}))
    assert not batched(torch.device("cuda"), geometry(selection={"row_size": 3}))
    monkeypatch.setenv("HISPARSE_BACKEND", "triton")
    assert batched(CPU, geometry())


def test_views_are_of_their_moment() -> None:
    pages, rows = [3, 1], [2]
    view = View(10, 4, 2, 1, pages, rows, CPU)
    pages.append(9)
    rows.append(8)
    assert view.pages.tolist() == [3, 1]
    assert view.rows.tolist() == view.host_rows.tolist() == [2]


class Layer:
    """Packed rows of two sequences on the host and on the device, for the step that benchmarks capture."""

    def __init__(self, rows: int = 40) -> None:
        make = torch.Generator().manual_seed(0)
        self.fmt = PageFormat(4, HEADS, DIM, 5, 5, DIM)
        keys, values = torch.randn(2, 2 * rows, 4, HEADS, DIM, generator=make)
        self.pages = pack_pages(keys, values, CALIBRATED, self.fmt)
        codes, scales = build_sketch(keys, CALIBRATED, 2)
        self.sketches = codes.flatten(1), scales.flatten(1)
        self.table = torch.randperm(2 * rows, generator=make).int().view(2, rows)
        self.count = torch.tensor([rows, rows - 7], dtype=torch.int32)
        self.host = HostPool(self.fmt.page_bytes, CPU)
        self.host.ensure(2 * rows)
        self.host.write(torch.arange(2 * rows), self.pages)
        self.q = torch.randn(2, 3 * HEADS, DIM, generator=make)
        self.dense = torch.randn(2, 2, HEADS, 5, DIM, generator=make)
        self.length = torch.tensor([5, 3], dtype=torch.int32)

    def rows(self, where: str) -> RecallRows:
        hot = HotBuffer.empty((12, 12), self.fmt.page_bytes, len(self.pages), CPU) if where == "hot" else None
        pool = self.pages if where == "device" else self.host.source
        return RecallRows(*self.sketches, self.table, self.count, pool, self.fmt, 2, hot)


def test_a_step_gives_the_same_wherever_rows_lie() -> None:
    layer = Layer()
    wanted = torch.tensor([9, 4], dtype=torch.int32)
    results = []
    for where in ("device", "host", "hot"):
        rows = layer.rows(where)
        for _ in range(2):  # the second time all rows are in the hot buffer
            results.append(
                recall_step(layer.q, *layer.dense, layer.length, None, rows, CALIBRATED, 0.2, 12, wanted, split="rope")
            )
        if rows.hot is not None:
            assert rows.hot.counters.tolist() == [[9, 9], [4, 4]]
    for result in results[1:]:
        assert torch.allclose(result.out, results[0].out, atol=1e-6)
        assert torch.allclose(result.lse, results[0].lse, atol=1e-6)
    nothing = recall_step(layer.q, *layer.dense, layer.length, None, None, None, 0.2, 12)
    assert not torch.allclose(nothing.out, results[0].out, atol=1e-2)


def test_a_step_recalls_the_rows_it_chose() -> None:
    layer = Layer()
    rows = layer.rows("hot")
    chosen = choose_rows(layer.q, rows, CALIBRATED, 0.2, 12)
    pages = bring_rows(rows, chosen)
    assert isinstance(pages, Pages)
    for b in range(2):
        own = chosen.rows[b, : int(chosen.number[b])].long()
        assert set(own.tolist()) <= set(layer.table[b, : int(layer.count[b])].tolist())
        assert torch.equal(pages.pool[pages.table[b, : len(own)].long()], layer.pages[own])
    every = choose_rows(layer.q, rows, CALIBRATED, 0.2, 40, everything=True)
    assert torch.equal(every.rows, layer.table)
    with pytest.raises(FormatError, match="a sequence has 12 slots in the hot buffer, but one step may use 40 rows"):
        bring_rows(rows, every)
    with pytest.raises(FormatError, match="may use 33 rows"):
        bring_rows(rows, every, (4, 33))


@settings(max_examples=100)
@given(st.data())
def test_recent_rows_are_those_of_the_last_scans(data: st.DataObject) -> None:
    batch, capacity, budget = data.draw(st.integers(1, 3)), 30, 5
    limit = data.draw(st.lists(st.integers(1, 12), min_size=batch, max_size=batch))
    recent, want = None, [[] for _ in range(batch)]
    for _ in range(data.draw(st.integers(1, 5))):
        scans = [
            data.draw(st.lists(st.sampled_from(range(b, capacity, batch)), unique=True, max_size=budget))
            for b in range(batch)
        ]
        rows = torch.tensor([[*scan, *[0] * (budget - len(scan))] for scan in scans], dtype=torch.int32)
        number = torch.tensor([len(scan) for scan in scans], dtype=torch.int32)
        recent = add_recent(Chosen(rows, number), recent, torch.tensor(limit, dtype=torch.int32), 12, capacity)
        want = [
            [*scan, *(row for row in old if row not in scan)][:most]
            for scan, old, most in zip(scans, want, limit, strict=True)
        ]
        assert recent.rows.shape == (batch, 12)
        assert [recent.rows[b, : recent.number[b]].tolist() for b in range(batch)] == want
