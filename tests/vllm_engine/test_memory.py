"""Blocks, rings and tables, without an engine: attention over them is attention over the tokens that were written."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.integrations.vllm import memory as memory_module
from hisparse.integrations.vllm.companions import choose_kept
from hisparse.integrations.vllm.layout import BlockLayout, choose_layout
from hisparse.integrations.vllm.memory import LayerMemory
from hisparse.integrations.vllm.step import Step, make_step, ring_place, row_budget
from hisparse.ops.scan import Chosen
from hisparse.tlif.scorer import NoveltyScorer

HEADS, QUERIES, DIM = 2, 6, 32
CPU = torch.device("cpu")
RAW = {"evict": "none", "vtq": {"enable_per_block_quant": False}}
SIX = {"default_bit_width": 6}  # bits enough to tell rounding from a token that is missing
CONFIGS: dict[str, dict[str, Any]] = {
    "raw": RAW,
    "kept": {"evict": "none", "vtq": SIX},
    "host": {"vtq": SIX},
    "host, one bit for want of room": {"vtq": SIX, "budget": {"capacity": 2.8}},
    "host, one bit, rows of 8": {"vtq": SIX, "selection": {"sketch_bits": 1, "row_size": 8}},
    "device": {"vtq": SIX, "selection": {"rows": "device"}},
    "pages of 8": {"vtq": {**SIX, "page_size": 8}},
}


def settings_of(name: str, **more: Any) -> HiSparseConfig:
    config: dict[str, Any] = {**CONFIGS[name], "tlif": {"prefix_length": 20}, **more}
    return HiSparseConfig(**config)


@dataclass
class Request:
    """What an engine would know of one request, and everything that was ever written for it."""

    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    ring: list[int] = field(default_factory=list)
    past: int = 0


class Engine:
    """The least of an engine: hands out shuffled blocks, packs full ones, attends."""

    def __init__(
        self, config: HiSparseConfig, tokens: int = 64, context: int = 1024, seed: int = 0, device: torch.device = CPU
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.config, self.device = config, device
        self.layout: BlockLayout = choose_layout(config, HEADS, DIM, torch.float32, context, tokens)
        blocks = torch.zeros(200, 1, 1, self.layout.block_bytes, dtype=torch.uint8, device=device)
        budget = row_budget(self.layout, config.selection, context)
        self.memory = LayerMemory(self.layout, config, blocks, None, torch.arange(DIM), DIM**-0.5, budget)
        self.free = (torch.randperm(199, generator=self.generator) + 1).tolist()
        self.scorer = NoveltyScorer(16)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def step(self, requests: list[Request], new: list[int]) -> Step:
        for request, number in zip(requests, new, strict=True):
            total = request.past + number
            while len(request.pages) * self.layout.tokens < total:
                request.pages.append(self.free.pop())
            lead = sum(block == 0 for block in request.ring)
            wanted = min(self.layout.ring_blocks, -(-(total - lead * self.layout.tokens) // self.layout.ring_tokens))
            while len(request.ring) - lead < wanted:
                request.ring.append(self.free.pop())
        tables = []
        for rows in ([r.pages for r in requests], [r.ring for r in requests]):
            table = torch.zeros(len(rows), 40, dtype=torch.int32)
            for i, row in enumerate(rows):
                table[i, : len(row)] = torch.tensor(row)
            tables.append(table.to(self.device))
        numbers = (torch.tensor([r.past for r in requests]), torch.tensor(new))
        past, added = (x.to(self.device) for x in numbers)
        return make_step(self.layout, self.config.selection, *tables, past, added, 20).narrowed()

    def read(self, request: Request, length: int) -> tuple[Tensor, Tensor]:
        """A chunk: attention [T, Hq, D], and what dense attention gives in float64."""
        q, k, v = self.randn(length, QUERIES, DIM), self.randn(length, HEADS, DIM), self.randn(length, HEADS, DIM)
        step = self.step([request], [length])
        out = self.memory.prefill(q, k, v, step, 0, request.past, int(step.packed[0]))
        request.k.append(k)
        request.v.append(v)
        expected = dense(q, torch.cat(request.k), torch.cat(request.v))
        ring = torch.tensor([request.ring + [0] * 40], dtype=torch.int32).to(self.device)
        number = min(length, self.layout.ring_slots)
        before, request.past = request.past, request.past + length
        position = torch.arange(request.past - number, request.past, device=self.device)[None]
        self.memory.write(ring_place(self.layout, ring, step.lead, position)[0], k[-number:], v[-number:])
        self.pack(request, before)
        return out, expected

    def pack(self, request: Request, before: int) -> None:
        tokens = self.layout.tokens
        k, v = torch.cat(request.k), torch.cat(request.v)
        for block in range(before // tokens, request.past // tokens):
            here = slice(block * tokens, (block + 1) * tokens)
            first = block == 0
            head = self.layout.head if first else 0
            counts = self.layout.first if first else self.layout.other
            kept = choose_kept(self.scorer, v[None, here].flatten(2), counts.pages * self.layout.page.tokens, head)
            if self.config.evict == "none":
                kept = torch.arange(tokens, device=self.device)[None] >= head
            blocks = torch.tensor([request.pages[block]], device=self.device)
            self.memory.pack(k[None, here], v[None, here], blocks, kept, first, k.repeat(1, 3, 1))

    def decode(self, requests: list[Request], together: bool = False) -> tuple[Tensor, Tensor]:
        """One token each: attention [B, Hq, D], and what dense attention gives."""
        q = self.randn(len(requests), QUERIES, DIM)
        k, v = self.randn(len(requests), HEADS, DIM), self.randn(len(requests), HEADS, DIM)
        step = self.step(requests, [1] * len(requests))
        out = self.memory.decode(q, k, v, step)
        if together:
            torch.testing.assert_close(self.memory.decode_batch(q, step), out, rtol=1e-4, atol=1e-5)
        expected = []
        for i, request in enumerate(requests):
            request.k.append(k[i : i + 1])
            request.v.append(v[i : i + 1])
            expected.append(dense(q[i : i + 1], torch.cat(request.k), torch.cat(request.v))[0])
            request.past += 1
            self.pack(request, request.past - 1)
        return out, torch.stack(expected)


def pool(rows: int, row_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """In the place of `host_pool`, which needs vLLM on a GPU."""
    made = torch.zeros(rows, row_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return made, made


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in float64; q [T, Hq, D] are the last of k, v [N, H, D]."""
    k, v = (x.double().repeat_interleave(QUERIES // HEADS, 1) for x in (k, v))
    scores = torch.einsum("thd,nhd->htn", q.double(), k) * DIM**-0.5
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    return torch.einsum("htn,nhd->thd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v).float()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_is_dense_attention_up_to_packing(name: str) -> None:
    """Everything fits the recall budget here, so that nothing but the bits of a value can differ."""
    engine = Engine(settings_of(name))
    some, other = Request(), Request()
    limit = 1e-5 if name == "raw" else 0.05
    for chunk in (1, 63, 90, 17):
        assert error(*engine.read(some, chunk)) < limit
    assert error(*engine.read(other, 200)) < limit
    for i in range(90):
        assert error(*engine.decode([some, other], together=i % 30 == 0)) < limit
    assert error(*engine.read(some, 150)) < limit
    assert error(*engine.decode([some])) < limit


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [(300, 70, 170), (1, 400), (130, 64, 65, 129)])
def test_requests_of_unequal_lengths_decode_together_by_kernels(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a step has a chunk as well: tables are columns of wider ones, as wide as the longest request needs."""
    pytest.importorskip("hisparse.integrations.vllm.step_kernels")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(memory_module, "host_pool", pool)
    engine, requests = Engine(settings_of(name), device=device), [Request() for _ in lengths]
    for request, length in zip(requests, lengths, strict=True):
        engine.read(request, length)
    step = engine.step(requests, [1] * len(requests))
    assert not step.dense.block.is_contiguous()
    q = engine.randn(len(requests), QUERIES, DIM)
    k, v = engine.randn(2, len(requests), HEADS, DIM)
    own = engine.memory
    alone = own.decode(q, k, v, step)
    if device.type == "cpu":
        monkeypatch.setenv("HISPARSE_BACKEND", "triton")
    together = copy(own)
    together.batched = True
    torch.testing.assert_close(together.decode(q, k, v, step), alone, rtol=1e-3, atol=1e-4)


@given(
    cuts=st.lists(st.integers(1, 170), min_size=1, max_size=6),
    steps=st.integers(0, 70),
    tokens=st.sampled_from([8, 16, 64]),
    tail=st.integers(1, 70),
    seed=st.integers(0, 9),
)
@settings(max_examples=25)
def test_any_pieces_give_exact_attention_when_nothing_is_packed(
    cuts: list[int], steps: int, tokens: int, tail: int, seed: int
) -> None:
    engine = Engine(settings_of("raw", tlif={"prefix_length": tail}), tokens=tokens, seed=seed)
    request = Request()
    for cut in cuts[: 3 if tokens == 8 else 6]:
        found, expected = engine.read(request, min(cut, 20 * tokens // len(cuts)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for _ in range(min(steps, 20 * tokens - request.past - 1)):
        found, expected = engine.decode([request])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_request_that_found_blocks_cached_reads_them_packed() -> None:
    engine = Engine(settings_of("raw"))
    owner = Request()
    engine.read(owner, 200)
    heir = Request(k=[torch.cat(owner.k)[:192]], v=[torch.cat(owner.v)[:192]], pages=owner.pages[:3], past=192)
    heir.ring = [0, 0, 0]  # three blocks found
    for _ in range(80):
        found, expected = engine.decode([heir, owner])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found, expected = engine.read(heir, 100)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choose", ["token", "chunk"])
@pytest.mark.parametrize("name", ["host", "device"])
def test_a_chunk_recalls_what_its_queries_ask_for(name: str, choose: str) -> None:
    """Every query asks for one token far back; all rows would be ten times the budget."""
    selection = {**CONFIGS[name].get("selection", {}), "min_tokens": 24, "root_factor": 0}
    config = settings_of(name, selection=selection, prefill={"mode": "recall", "choose": choose})
    engine = Engine(config)
    request = Request()
    engine.read(request, 800)
    past_k, past_v = torch.cat(request.k), torch.cat(request.v)
    places = torch.tensor([40, 41, 42, 300, 301, 303])
    q = 4 * past_k[places].repeat_interleave(QUERIES // HEADS, 1)
    k, v = engine.randn(len(q), HEADS, DIM), engine.randn(len(q), HEADS, DIM)
    step = engine.step([request], [len(q)])
    out = engine.memory.prefill(q, k, v, step, 0, request.past, int(step.packed[0]))
    assert error(out, dense(q, torch.cat([past_k, k]), torch.cat([past_v, v]))) < 0.1
    budget = -(-24 // engine.layout.row.tokens)
    assert int(engine.memory.recalled) <= 4 * budget * (len(q) if choose == "token" else 1)


@pytest.mark.parametrize("name", ["host", "device", "kept"])
def test_what_one_request_overflowed_is_counted_and_harms_no_other(name: str) -> None:
    engine = Engine(settings_of(name))
    some, other = Request(), Request()
    assert error(*engine.read(other, 150)) < 0.05
    engine.read(some, 100)
    assert int(engine.memory.faults) == 0
    some.k[0][70] = float("nan")
    some.v[0][80, 1, 5] = float("inf")
    engine.pack(some, 0)
    engine.read(some, 100)
    assert int(engine.memory.faults) > 0
    for _ in range(30):
        found, expected = engine.decode([some, other])
        assert error(found[1], expected[1]) < 0.05


@pytest.mark.parametrize("batched", [False, True])
def test_a_layer_follows_the_choice_of_the_one_ahead(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings_of("host", selection={"min_tokens": 16, "root_factor": 0.0, "share_layers": 2})
    engine, request = Engine(config), Request()
    engine.read(request, 700)
    own = engine.memory

    def layer(lead: LayerMemory | None = None) -> LayerMemory:
        blocks = own.blocks.view(-1, 1, 1, own.layout.block_bytes)
        made = LayerMemory(
            own.layout, config, blocks, own.stats, own.order, own.scaling, own.budget, batched, lead=lead
        )
        made.row_pages[:] = own.row_pages
        return made

    alone, first = layer(), layer()
    second = layer(first)
    chosen: list[Chosen] = []
    original = memory_module.scan_and_select

    def spy(*arguments: Any) -> Chosen:
        chosen.append(original(*arguments))
        return chosen[-1]

    for _ in range(2):  # what was chosen for the last step is not taken
        step = engine.step([request], [1])
        q, other = engine.randn(1, QUERIES, DIM), engine.randn(1, QUERIES, DIM)
        k, v = engine.randn(1, HEADS, DIM), engine.randn(1, HEADS, DIM)
        chosen.clear()
        monkeypatch.setattr(memory_module, "scan_and_select", spy)
        first.decode(q, k, v, step)
        found = second.decode(other, k, v, step)
        assert len(chosen) == 1
        assert not torch.allclose(alone.decode(other, k, v, step), found, atol=1e-3)
        monkeypatch.setattr(memory_module, "scan_and_select", lambda *_: chosen[0])
        torch.testing.assert_close(alone.decode(other, k, v, step), found, rtol=1e-4, atol=1e-5)


def test_padding_reads_nothing_and_writes_to_nobodys_block() -> None:
    engine = Engine(settings_of("host"))
    request = Request()
    engine.read(request, 300)
    pages = torch.tensor([request.pages + [0] * 10, [7] * (len(request.pages) + 10)], dtype=torch.int32)
    ring = torch.tensor([request.ring + [0] * 20, [0] * (len(request.ring) + 20)], dtype=torch.int32)
    step = make_step(
        engine.layout, engine.config.selection, pages, ring, torch.tensor([300, 9000]), torch.tensor([1, 0]), 20
    )
    assert step.new.block[1] == 0
    assert step.kept_count[1] == step.row_count[1] == step.packed[1] == 0
    assert step.kept_count[0] > 0


def test_a_step_keeps_its_addresses() -> None:
    engine = Engine(settings_of("host"))
    request = Request()
    engine.read(request, 300)
    step = engine.step([request], [1])
    room = step.room(4)
    part = step.copied(room)
    assert part.kept_table.data_ptr() == room.kept_table.data_ptr()
    assert part.dense.block.data_ptr() == room.dense.block.data_ptr()
    for name in ("kept_table", "row_table", "wanted", "dense_past"):
        assert torch.equal(getattr(part, name), getattr(step, name))


@given(
    heads=st.integers(1, 8),
    dim=st.sampled_from([32, 64, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    context=st.sampled_from([512, 8192, 131072]),
    tokens=st.sampled_from([64, 128, 256]),
    name=st.sampled_from(sorted(CONFIGS)),
)
@settings(max_examples=40)
def test_records_fit_and_do_not_overlap(
    heads: int, dim: int, dtype: torch.dtype, context: int, tokens: int, name: str
) -> None:
    layout = choose_layout(HiSparseConfig(**CONFIGS[name]), heads, dim, dtype, context, tokens)
    page, row = layout.page.tokens, layout.row.tokens
    for counts, head, taken in ((layout.first, layout.head, layout.head_pages), (layout.other, 0, 0)):
        assert head + counts.pages * page + counts.rows * row == layout.tokens
        assert (taken + counts.pages) * layout.page_stride + counts.rows * layout.row_stride <= layout.block_bytes
    assert layout.head * layout.token_bytes <= layout.head_pages * layout.page_stride
    assert layout.block_bytes % layout.page_stride == 0
    assert not layout.has_rows or layout.block_bytes % layout.row_stride == 0
    assert layout.ring_slots >= layout.tokens + layout.tail


def test_block_sizes_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="hisparse_block_tokens = 30"):
        choose_layout(HiSparseConfig(), HEADS, DIM, torch.float32, 1024, 30)


def test_the_target_is_met_where_the_context_allows_it() -> None:
    """The shapes of two models at the contexts that they are served with."""
    for heads, dim, context in ((4, 128, 1 << 20), (8, 128, 1 << 17)):
        layout = choose_layout(HiSparseConfig(), heads, dim, torch.bfloat16, context)
        assert layout.capacity(context) >= 9
        assert layout.other.pages * layout.page.tokens >= 0.05 * layout.tokens


def test_a_short_context_meets_the_target_with_sketches_of_one_bit() -> None:
    """Unless two bits were asked for."""
    for heads, dim in ((3, 64), (2, 64), (8, 128), (4, 128)):
        layout = choose_layout(HiSparseConfig(), heads, dim, torch.bfloat16, 8192)
        assert (layout.sketch_bits, layout.capacity(8192) >= 9) == (1, True)
        asked = choose_layout(HiSparseConfig(selection={"sketch_bits": 2}), heads, dim, torch.bfloat16, 8192)
        assert (asked.sketch_bits, asked.capacity(8192) >= 9) == (2, False)
        hopeless = choose_layout(HiSparseConfig(), heads, dim, torch.bfloat16, 1024)
        assert hopeless.sketch_bits == 2


@pytest.mark.parametrize("name", ["host", "device", "raw"])
def test_blocks_filled_with_random_content_can_be_read(name: str) -> None:
    """What benchmarks of decoding read: every block valid, whoever gets it."""
    from hisparse.integrations.vllm.filling import Filling

    engine = Engine(settings_of(name))
    engine.memory.blocks.fill_(0xFF)  # what earlier requests left
    engine.memory.dense[0] = 0
    request = Request(k=[torch.zeros(640, HEADS, DIM)], v=[torch.zeros(640, HEADS, DIM)], past=640, ring=[0] * 10)
    engine.step([request], [1])
    filling = Filling(engine.memory)
    before = engine.memory.blocks
    for _ in range(2):
        before = engine.memory.blocks.clone()
        filling.fill(request.pages[:1], True)
        filling.fill(request.pages[1:], False)
    assert torch.equal(before, engine.memory.blocks)  # what is there already stays
    places = (0, 1000, -1)
    for page, place in zip(request.pages, places, strict=False):
        engine.memory.blocks[page, place] ^= 0x55  # a token lay there for a while
    filling.fill(request.pages[:1], True)
    filling.fill(request.pages[1:], False)
    changed = (before != engine.memory.blocks)[request.pages].sum(1)
    assert bool((changed[: len(places)] > 100).all())
    assert not changed[len(places) :].any()
    for _ in range(30):
        found, _ = engine.decode([request])
        assert bool(found.isfinite().all())
    assert float(found.norm()) > 0
