"""Blocks of a pool of more than 2**33 bytes are written and read as those of a small one, bit for bit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.integrations.vllm.hot import record_rows
from hisparse.integrations.vllm.layout import choose_layout
from hisparse.integrations.vllm.memory import LayerMemory
from hisparse.integrations.vllm.step import make_step, ring_place
from hisparse.ops._cuda import can_run
from hisparse.ops.fetch import HostRows
from hisparse.vtq.stats import ChannelStats

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from large_pools import NONSENSE, far_lines, large_pool

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from hisparse.integrations.vllm import step_kernels
from hisparse.ops.fetch import triton as fetch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, DIM, TOKENS = 2, 64, 64


def test_new_tokens_and_those_read_densely() -> None:
    slots, batch, each = 5, 4, 19
    token = 2 * HEADS * DIM
    line = 2 * slots * token + 32
    make, lines = torch.Generator().manual_seed(0), far_lines(17, line).to(DEVICE)
    small = torch.randn(17, line // 2, generator=make).bfloat16().to(DEVICE)
    large = large_pool(line, DEVICE).view(torch.bfloat16)
    large[lines] = small
    places = torch.randperm(85, generator=make)[: batch * (each + 1)].view(batch, -1).to(DEVICE)
    past = torch.tensor([0, 7, 8, 18], dtype=torch.int32, device=DEVICE)
    block, slot = places[:, :each] // slots, places[:, :each] % slots
    new = places.gather(1, past[:, None].long())[:, 0]
    k, v = torch.randn(2, batch, HEADS, DIM, generator=make).bfloat16().to(DEVICE)
    results = []
    for memory, ids in ((small, torch.arange(17, device=DEVICE)), (large, lines)):
        dense = memory[:, : slots * token].view(len(memory), slots, 2, HEADS, DIM)
        results.append(step_kernels.renew(dense, ids[block], slot, past, ids[new // slots], new % slots, k, v))
    (want, lengths), (found, also) = results
    assert lengths.tolist() == also.tolist() == [1, 8, 9, 19]
    for b, n in enumerate(lengths.tolist()):
        assert torch.equal(found[b, :n], want[b, :n])
    assert torch.equal(large[lines], small)


def test_rows_of_the_host_under_the_numbers_of_their_records() -> None:
    layout = choose_layout(HiSparseConfig(), HEADS, DIM, torch.bfloat16, 1 << 20, TOKENS)
    size = layout.row.page_bytes
    pool = large_pool(size, DEVICE)
    blocks = (len(pool) - layout.host_lead) // layout.host_rows
    lines = far_lines(20, layout.host_rows * size).clamp_max(blocks - 1)
    chosen = torch.tensor(sorted(set(lines.tolist())))
    every = torch.arange(layout.host_lead, layout.rows_per_block)
    records = (chosen[:, None] * layout.rows_per_block + every).flatten().int().to(DEVICE)
    assert int(chosen[-1]) * layout.host_rows * size > 2**33
    rows = torch.randint(0, 256, (len(records), size), generator=torch.Generator().manual_seed(0))
    rows = rows.to(torch.uint8).to(DEVICE)
    own = HostRows.of([pool[layout.host_lead :]], DEVICE)
    fetch.store_rows(own, layout.host_id(records), rows)
    assert torch.equal(fetch.gather_rows(own, layout.host_id(records)[None], None), rows)
    found = fetch.gather_rows(record_rows(layout, pool, blocks, DEVICE), records[None], None)
    assert torch.equal(found, rows)


@pytest.mark.skipif(DEVICE.type == "cuda" and not can_run(None), reason="Triton on a GPU lists rows in any order")
def test_a_layer_packs_and_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests, of three blocks and of one, with their rings; rows in the blocks."""
    config = HiSparseConfig(tlif={"prefix_length": 20}, selection={"rows": "device", "min_tokens": 16})
    layout = choose_layout(config, HEADS, DIM, torch.bfloat16, 1 << 20, TOKENS)
    rings, columns, number = layout.ring_blocks, 4 + layout.ring_blocks, 4 + 2 * layout.ring_blocks
    make = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 4, TOKENS, HEADS, DIM, generator=make).bfloat16().to(DEVICE)
    order = torch.rand(4, TOKENS, generator=make)
    newest = torch.randn(2, 2, 30, HEADS, DIM, generator=make).bfloat16().to(DEVICE)
    new_k, new_v = torch.randn(2, 2, HEADS, DIM, generator=make).bfloat16().to(DEVICE)
    q = torch.randn(2, 2 * HEADS, DIM, generator=make).bfloat16().to(DEVICE)
    past = torch.tensor([3 * TOKENS + 30, TOKENS + 30], device=DEVICE)

    def run(blocks: Tensor, ids: Tensor) -> Tensor:
        stats = ChannelStats.identity(HEADS, DIM).to(DEVICE)
        memory = LayerMemory(layout, config, blocks, stats, torch.arange(DIM), DIM**-0.5, 8, True)
        for here, first in ((torch.tensor([0, 3]), True), (torch.tensor([1, 2]), False)):
            counts, head = (layout.first, layout.head) if first else (layout.other, 0)
            kept = torch.zeros(2, TOKENS, dtype=torch.bool)
            best = order[here, head:].topk(counts.pages * layout.page.tokens).indices + head
            kept.scatter_(1, best, True)
            memory.pack(k[here], v[here], ids[here], kept.to(DEVICE), first)
        tables = torch.zeros(2, 2, columns, dtype=torch.int32, device=DEVICE)
        tables[0, 0, :3], tables[0, 1, :1] = ids[:3], ids[3:4]
        tables[1, :, :rings] = ids[4:].view(2, rings)
        step = make_step(
            layout, config.selection, tables[0], tables[1], past, torch.ones(2, dtype=torch.int64, device=DEVICE), 4
        )
        place = ring_place(layout, tables[1], step.lead, past[:, None] - 30 + torch.arange(30, device=DEVICE))
        memory.write(place, newest[0], newest[1])
        with pytest.MonkeyPatch.context() as patch:
            if DEVICE.type == "cpu":
                patch.setenv("HISPARSE_BACKEND", "triton")
            return memory.decode(q, new_k, new_v, step)

    lines = far_lines(number + 1, layout.block_bytes)
    lines = lines[lines > 0].to(DEVICE)  # block 0 is nobody's
    small = torch.full((number + 1, layout.block_bytes), NONSENSE, dtype=torch.uint8, device=DEVICE)
    large = large_pool(layout.block_bytes, DEVICE)
    large[lines] = NONSENSE
    want = run(small[:, None, None], torch.arange(1, number + 1, device=DEVICE))
    found = run(large[:, None, None], lines)
    assert want.isfinite().all()
    assert torch.equal(found, want)
    assert torch.equal(large[lines], small[1:])
