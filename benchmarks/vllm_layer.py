"""One layer of HiSparse's vLLM backend in a CUDA graph: microseconds a decode step, and each kernel's part of it.

    python benchmarks/vllm_layer.py --context 1048576 --batch 1 --layers 2 --out FILE

The layer is what the engine runs between its projections, with blocks of random tokens and queries that drift
(`--drift`: the share that is new in each step). Layers take turns, so that one finds little of its own in the L2 cache.
`--weights` reads so many bytes of a matrix of its own before each layer, as an engine's projections do (`us` is less
what that takes alone); `--seconds` does the same for so long before it is timed, as a server does: see `clock_mhz`.
Needs a CUDA device, not vLLM. How exact the layer is, tests/vllm_engine says.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse.bench.results import commit_name, device_name
from hisparse.bench.shapes import SHAPES
from hisparse.config import HiSparseConfig
from hisparse.integrations.vllm import memory as backend
from hisparse.integrations.vllm.anchors import AnchorShare
from hisparse.integrations.vllm.filling import Filling
from hisparse.integrations.vllm.hot import HOT_SHARE, Claims, HotRows, hot_size
from hisparse.integrations.vllm.layout import BlockLayout, choose_layout
from hisparse.integrations.vllm.step import Step, make_step, row_budget
from hisparse.ops.fetch.pinned import pinned_rows
from hisparse.vtq.stats import ChannelStats

LONGEST = 1 << 20  # tokens: the layout and the budget are those of --max-model-len at this length
TOKENS = 256  # of a block
STEPS, WARM = 24, 8


def pool(rows: int, row_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pinned memory: device and host have the same addresses."""
    made = pinned_rows(rows, row_bytes)
    return made, made


def tables(
    layout: BlockLayout, config: HiSparseConfig, held: Tensor, own: Tensor, context: int, most: int, budget: int
) -> Step:
    """Of requests that have the blocks `held` int32 [B, n], and the blocks `own` int32 [B, m] as their rings."""
    (batch, blocks), device, width = held.shape, torch.device("cuda"), LONGEST // TOKENS
    pages = torch.zeros(batch, width + 1, dtype=torch.int32, device=device)
    pages[:, :blocks] = held
    ring = torch.zeros(batch, width + 20, dtype=torch.int32, device=device)
    ring[:, blocks : blocks + layout.ring_blocks] = own
    past = torch.full((batch,), context + 40, device=device)
    new = torch.ones(batch, dtype=torch.int64, device=device)
    step = make_step(layout, config.selection, pages, ring, past, new, width)
    return step.limited(most, budget) if most else step


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    backend.host_pool = pool
    shape, batch, number = SHAPES[arguments.shape], arguments.batch, arguments.layers
    config = HiSparseConfig()
    layout = choose_layout(config, shape.heads, shape.dim, torch.bfloat16, LONGEST, TOKENS, HOT_SHARE)
    budget = row_budget(layout, config.selection, LONGEST)
    each = arguments.context // TOKENS
    needed = batch * (each + layout.ring_blocks)
    blocks = max(arguments.pool or 0, 1 + needed)
    # They lie in any order and anywhere in the pool, as those of a server that has run for a while do.
    mine = 1 + torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(1))[:needed].int().to(device)
    held, own = mine[: batch * each].view(batch, each), mine[batch * each :].view(batch, layout.ring_blocks)
    size = hot_size(config.selection, layout, budget, batch, arguments.kv_memory // shape.layers)
    size = size._replace(rows=blocks * layout.rows_per_block)
    order = torch.arange(shape.dim)
    stats = ChannelStats.identity(shape.heads, shape.dim, order).to(device)
    claims = Claims(size.rows, device)
    step = tables(layout, config, held, own, arguments.context, size.slots, budget)
    layers = []
    for index in range(number):
        data = torch.zeros(blocks, 1, 1, layout.block_bytes, dtype=torch.uint8, device=device)
        room = int(config.selection.hot_factor * budget)
        hot = HotRows(size, layout, room, batch, claims, device) if size.slots else None
        anchors = AnchorShare(device) if arguments.anchors and index == number - 1 else None
        memory = backend.LayerMemory(layout, config, data, stats, order, shape.dim**-0.5, budget, True, hot, anchors)
        filling = Filling(memory)
        filling.fill(held[:, 0].tolist(), True)
        filling.fill(held[:, 1:].flatten().tolist(), False)
        layers.append(memory)
    make = torch.Generator(device).manual_seed(0)
    noise = torch.randn(STEPS + WARM + 1, batch, shape.q_heads, shape.dim, generator=make, device=device)
    walk = [noise[-1]]
    for new in noise[:-1]:
        walk.append(walk[-1] * (1 - 1e-3) + new * (2e-3) ** 0.5 * 0.5)
    fast = arguments.drift
    queries = (1 - fast * fast) ** 0.5 * torch.stack(walk[1:]) + fast * noise[:-1].flip(0)
    queries = (arguments.spread * queries).bfloat16()
    k, v = (torch.randn(batch, shape.heads, shape.dim, generator=make, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(queries[0])

    width = shape.q_heads * shape.dim
    weights = [
        torch.zeros(arguments.weights // (2 * width), width, dtype=torch.bfloat16, device=device) for _ in range(number)
    ]
    state = torch.zeros(width, dtype=torch.bfloat16, device=device)

    def run(some: Tensor, attend: bool = True) -> None:
        for query in some:
            for memory, weight in zip(layers, weights, strict=True):
                if len(weight):
                    weight @ state
                if attend:
                    memory.decode(query, k, v, step, out)

    run(queries[:1])
    torch.cuda.synchronize()
    warm, timed = capture(partial(run, queries[:WARM])), capture(partial(run, queries[WARM:]))
    alone = replay_us(capture(partial(run, queries[WARM:], False)), 0.0) if arguments.weights else 0.0
    replay_us(timed, 0.0)  # a graph's first replay takes longer
    replay_us(timed, arguments.seconds)
    clock = clock_mhz()
    warm.replay()
    before = counts(layers)
    us = (replay_us(timed, 0.0) - alone) / STEPS / number
    found = counts(layers) - before
    hits, missed = int(found[0]), int(found[1])
    return {
        "shape": arguments.shape, "context": arguments.context, "batch": batch, "layers": number, "pool": blocks,
        "anchors": arguments.anchors, "weights": arguments.weights,
        "seconds": arguments.seconds, "spread": arguments.spread, "clock_mhz": clock, "us": round(us, 1),
        "hit_rate": round(hits / max(hits + missed, 1), 3), "missed": round(missed / STEPS / number),
        "kernels_us": kernels(timed, STEPS * number),
    }  # fmt: skip


def counts(layers: list[backend.LayerMemory]) -> Tensor:
    """int64 [4], as of `HotRows.counts`, of all layers; zero where they have no buffers."""
    buffers = [memory.hot.counts() for memory in layers if memory.hot is not None]
    return torch.stack(buffers).sum(0) if buffers else torch.zeros(4, dtype=torch.int64)


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Microseconds of the last replay; replayed again and again for `seconds`, once at least."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stop = time.monotonic() + seconds
    while True:
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if time.monotonic() >= stop:
            return float(begin.elapsed_time(end)) * 1e3


def clock_mhz() -> int | None:
    """Of the multiprocessors, now; None without NVIDIA's management library."""
    try:
        return torch.cuda.clock_rate()
    except (ImportError, RuntimeError):
        return None


def kernels(graph: torch.cuda.CUDAGraph, calls: int) -> dict[str, float]:
    """Mean microseconds from start to end of each kernel, once a layer and step; they overlap."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            times[event.name.split("(")[0]] += event.time_range.elapsed_us()
    return {name: round(total / calls, 1) for name, total in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="glm4-9b-1m")
    parser.add_argument("--context", nargs="+", type=int, default=[1 << 20])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--pool", type=int, help="blocks of the pool; else what the requests need")
    parser.add_argument("--weights", type=int, default=0, help="bytes of weights that are read before each layer")
    parser.add_argument("--seconds", type=float, default=0.0, help="of the same work before it is timed")
    parser.add_argument("--anchors", action="store_true", help="the last layer counts the anchor hit rate, too")
    parser.add_argument("--drift", type=float, default=0.3)
    parser.add_argument("--spread", type=float, default=1.0, help="length of queries; 0.001: rows of one worth")
    parser.add_argument("--kv-memory", type=int, default=80_000_000_000, help="bytes; 0: no hot buffer")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures GPU kernels and PyTorch finds no CUDA device here")
    for context in arguments.context:
        if context % TOKENS or not TOKENS <= context < LONGEST + TOKENS:
            parser.error(f"--context {context}: give a multiple of {TOKENS}, {LONGEST} at most")
    rows = []
    for context in arguments.context:
        rows.append(measure(argparse.Namespace(**{**vars(arguments), "context": context})))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out is not None:
        record = {"gpu": device_name(), "torch": torch.__version__, "commit": commit_name(), "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
