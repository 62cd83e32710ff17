"""Full blocks that are packed together, and in a CUDA graph, are packed as one after the other."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_memory import pool
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.integrations.vllm import memory as memory_module
from hisparse.integrations.vllm import packing as packing_module
from hisparse.integrations.vllm.companions import choose_kept
from hisparse.integrations.vllm.hot import Claims, HotRows, HotSize
from hisparse.integrations.vllm.layout import choose_layout
from hisparse.integrations.vllm.memory import LayerMemory
from hisparse.integrations.vllm.packing import Decide, Full, Packer, Packing, pack_layers
from hisparse.integrations.vllm.step import Place
from hisparse.integrations.vllm.warm import warm_packing, warm_prefill
from hisparse.tlif.scorer import NoveltyScorer
from hisparse.vtq.stats import ChannelStats

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HEADS, DIM, TOKENS, BLOCKS, LAYERS = 2, 64, 64, 90, 3
ROWS: dict[str, dict[str, Any]] = {"host": {}, "device": {"selection": {"rows": "device"}}}


class Engine:
    """Layers whose blocks hold random dense tokens."""

    def __init__(self, kind: str, graphs: bool, seed: int = 0, mode: str = "full") -> None:
        make = torch.Generator().manual_seed(seed)
        config = HiSparseConfig(tlif={"prefix_length": 20}, prefill={"mode": mode}, **ROWS[kind])  # type: ignore[arg-type]
        self.layout = layout = choose_layout(config, HEADS, DIM, torch.bfloat16, 1 << 20, TOKENS)
        self.layers = []
        slots = max(layout.ring_tokens, layout.head)
        for _ in range(LAYERS):
            blocks = torch.zeros(BLOCKS, 1, 1, layout.block_bytes, dtype=torch.uint8, device=DEVICE)
            stats = ChannelStats.identity(HEADS, DIM).to(DEVICE)
            hot = None
            if kind == "host":
                claims = Claims(BLOCKS * layout.rows_per_block, DEVICE)
                hot = HotRows(HotSize(64, 1, 0, BLOCKS * layout.rows_per_block), layout, 16, 1, claims, DEVICE)
            made = LayerMemory(layout, config, blocks, stats, torch.arange(DIM), 0.125, 16, CUDA, hot)
            made.dense[:] = torch.randn(BLOCKS, slots, 2, HEADS, DIM, generator=make).to(DEVICE)
            self.layers.append(made)
        self.scorer = NoveltyScorer(16)
        self.packer = Packer(self.layers, self.decide, graphs)

    def decide(self, values: Tensor, first: bool) -> Tensor:
        counts = self.layout.first if first else self.layout.other
        number, head = counts.pages * self.layout.page.tokens, self.layout.head if first else 0
        return choose_kept(self.scorer, values.flatten(2), number, head)

    def full(self, number: int, first: bool, seed: int) -> Full:
        """Tokens anywhere in the first half of the blocks, to be packed in the second half."""
        make = torch.Generator().manual_seed(seed)
        blocks = torch.randperm(BLOCKS // 2, generator=make)[:number] + BLOCKS // 2
        slots = self.layout.ring_tokens
        place = torch.stack([torch.randperm(BLOCKS // 2 * slots, generator=make)[:TOKENS] for _ in range(number)])
        return Full(blocks.to(DEVICE), Place((place // slots).to(DEVICE), (place % slots).to(DEVICE)), first)

    def content(self) -> list[Tensor]:
        """All bytes that packing may have changed."""
        if CUDA:
            torch.cuda.synchronize()
        parts = [memory.blocks.cpu() for memory in self.layers]
        parts += [memory.row_pages.cpu() for memory in self.layers if memory.source is not None]
        return [*parts, *(memory.faults.cpu() for memory in self.layers)]


@pytest.fixture(autouse=True)
def _pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "host_pool", pool)


def one_by_one(engine: Engine, full: Full) -> None:
    for i in range(len(full)):
        kept: Tensor | None = None
        for memory in engine.layers:
            k, v = memory.read(full.place[i : i + 1])
            if kept is None:
                kept = engine.decide(v, full.first)
            memory.pack(k, v, full.blocks[i : i + 1], kept, full.first)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
def test_blocks_packed_together_are_those_packed_alone(
    kind: str, first: bool, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU by graphs: those of each size capture first, then replay. Pages of two heads have padding."""
    monkeypatch.setitem(globals(), "HEADS", heads)
    together, alone = Engine(kind, CUDA), Engine(kind, False)
    for seed, number in enumerate((1, 3, 13, 3, 13, 1)):
        together.packer.pack(together.full(number, first, seed))
        one_by_one(alone, alone.full(number, first, seed))
        for a, b in zip(together.content(), alone.content(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_graph_counts_what_cannot_be_packed_and_looks_at_pages() -> None:
    engine = Engine("host", True)
    for seed in range(3):
        engine.packer.pack(engine.full(8, False, seed))
    assert all(float(memory.error) == 0 or float(memory.error) < 0.1 for memory in engine.layers)
    assert any(float(memory.error) > 0 for memory in engine.layers)
    full = engine.full(8, False, 3)
    engine.layers[1].dense[full.place.block[2, 5], full.place.slot[2, 5], 1, 0, 7] = float("inf")
    engine.packer.pack(full)
    assert [int(memory.faults) > 0 for memory in engine.layers] == [False, True, False]


@settings(deadline=None, max_examples=20)
@given(number=st.integers(0, 5), first=st.booleans(), seed=st.integers(0, 1000), kind=st.sampled_from(list(ROWS)))
def test_every_token_of_a_block_goes_to_one_place(number: int, first: bool, seed: int, kind: str) -> None:
    config = HiSparseConfig(tlif={"prefix_length": 20}, **ROWS[kind])  # type: ignore[arg-type]
    layout = choose_layout(config, HEADS, DIM, torch.bfloat16, 1 << 20, TOKENS)
    counts, head = (layout.first, layout.head) if first else (layout.other, 0)
    make = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(50, generator=make)[:number]
    order = torch.rand(number, TOKENS, generator=make)
    order[:, :head] = -1
    kept = torch.zeros(number, TOKENS, dtype=torch.bool)
    kept.scatter_(1, order.topk(counts.pages * layout.page.tokens).indices, True)
    packing = Packing.of(layout, blocks, kept, first)
    assert packing.page_tokens.shape == (number * counts.pages, layout.page.tokens)
    assert packing.row_tokens.shape == (number * counts.rows, layout.row.tokens)
    assert kept.flatten()[packing.page_tokens].all()
    assert not kept.flatten()[packing.row_tokens].any()
    heads = (torch.arange(number)[:, None] * TOKENS + torch.arange(head)).flatten()
    every = torch.cat([heads, packing.page_tokens.flatten(), packing.row_tokens.flatten()])
    assert torch.equal(every.sort().values, torch.arange(number * TOKENS))
    for tokens, records, per in (
        (packing.page_tokens, packing.pages, layout.pages_per_block),
        (packing.row_tokens, packing.rows, layout.rows_per_block),
    ):
        assert len(records.unique()) == len(records)
        assert torch.equal(records // per, blocks[tokens[:, 0] // TOKENS])
        assert (tokens.diff(dim=1) > 0).all()  # in order
    assert len(packing.lines.unique()) == len(packing.lines)


@pytest.mark.parametrize("mode", ["full", "recall"])
@pytest.mark.parametrize("kind", ROWS)
def test_warming_up_changes_nothing_that_counts(kind: str, mode: str) -> None:
    engine = Engine(kind, CUDA, mode=mode)
    full = engine.full(5, False, 1)
    engine.packer.pack(full)
    before = engine.content()
    warm_packing(engine.packer)
    warm_prefill(engine.layers[0], 2 * HEADS)
    memory = engine.layers[0]
    assert (int(memory.recalled), int(memory.steps)) == (0, 0)
    bytes_of = engine.layout.block_bytes
    for a, b in zip(engine.content(), before, strict=True):
        if a.shape[-1] == bytes_of:  # block 0 is nobody's
            a, b = a[1:], b[1:]
        elif a.dim() == 2:
            a, b = a[engine.layout.host_rows :], b[engine.layout.host_rows :]
        assert torch.equal(a, b)


def test_the_first_page_after_warming_up_is_looked_at() -> None:
    engine = Engine("host", CUDA)
    warm_packing(engine.packer)
    assert [float(memory.error) for memory in engine.layers] == [0.0] * LAYERS
    for seed in range(LAYERS):  # a graph looks at a page of one layer after the other
        engine.packer.pack(engine.full(8, False, seed))
    assert all(0 < float(memory.error) < 0.1 for memory in engine.layers)


class Recorded:
    """In the place of a graph: packs what it is given, as the graph would."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, layers: list[LayerMemory], full: Full, decide: Decide, pool: object) -> None:
        self.layers, self.decide, self.full = layers, decide, full

    def replay(self, full: Full) -> None:
        self.full = full
        self.sizes.append(len(full))
        self.packing = pack_layers(self.layers, full, self.decide, check=False)


class Failing:
    def __init__(self, *args: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    for name in ("graph_pool_handle", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)


@pytest.mark.usefixtures("no_device")
def test_as_few_graphs_as_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "_Graph", Recorded)
    graphs, alone = Engine("host", True), Engine("host", False)
    for seed, number in enumerate((15, 15, 21)):
        Recorded.sizes.clear()
        graphs.packer.pack(graphs.full(number, False, seed))
        one_by_one(alone, alone.full(number, False, seed))
        assert Recorded.sizes == {0: [], 1: [8, 4, 2, 1], 2: [8, 8, 4, 1]}[seed]
        assert all(torch.equal(a, b) for a, b in zip(graphs.content(), alone.content(), strict=True))


@pytest.mark.usefixtures("no_device")
def test_what_cannot_be_captured_is_packed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packing_module, "_Graph", Failing)
    graphs, alone = Engine("device", True), Engine("device", False)
    with caplog.at_level("WARNING", "vllm.hisparse"):
        graphs.packer.pack(graphs.full(11, False, 0))
    one_by_one(alone, alone.full(11, False, 0))
    assert not graphs.packer.graphs
    assert all(torch.equal(a, b) for a, b in zip(graphs.content(), alone.content(), strict=True))
