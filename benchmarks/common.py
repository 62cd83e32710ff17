"""What the kernel benchmarks share: shapes, timing by CUDA graph replays, the card's read bandwidth, result files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# The kernels under test, also those that do not serve CUDA tensors unasked yet.
os.environ.setdefault("HISPARSE_BACKEND", "triton")

SHAPES = {  # query heads, KV heads, head_dim
    "glm4-9b-1m": (32, 4, 128),
    "llama3.1-8b": (32, 8, 128),
    "qwen2.5-7b-1m": (28, 4, 128),
    "qwen2.5-72b": (64, 8, 128),
    "qwen2.5-0.5b": (14, 2, 64),
}


@triton.jit
def _read(p_x, p_out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    i = tl.arange(0, BLOCK)
    for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        total += tl.load(p_x + at + i, mask=at + i < n, other=0, eviction_policy="evict_first")
    tl.store(p_out + tl.program_id(0), tl.sum(total, 0))


def graph_ms(runs: list[Callable[[], object]], budget_ms: float = 60.0) -> float:
    """Milliseconds of one run: all of `runs` in one CUDA graph, replayed; the median of five timings."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    repeats = max(2, min(200, int(budget_ms / 5 / max(begin.elapsed_time(end), 1e-3))))
    times = []
    for _ in range(5):
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats / len(runs))
    return sorted(times)[2]


def read_bandwidth() -> float:
    """Bytes a second that a plain kernel reads, of 4 GiB."""
    x = torch.randint(0, 100, (1 << 30,), dtype=torch.int32, device="cuda")
    best = float("inf")
    for programs, block, warps in ((1056, 4096, 8), (2112, 4096, 8), (1056, 8192, 8)):
        out = torch.empty(programs, dtype=torch.int32, device="cuda")
        best = min(
            best, graph_ms([lambda p=programs, o=out, b=block, w=warps: _read[(p,)](x, o, len(x), b, num_warps=w)])
        )
    return x.nbytes / best * 1e3


def dense_ms(shape: str, context: int) -> float:
    """Dense bf16 decode attention of one layer, batch 1."""
    q_heads, heads, dim = SHAPES[shape]
    q = torch.randn(1, q_heads, 1, dim, dtype=torch.bfloat16, device="cuda")
    sets = max(1, -(-(256 << 20) // (4 * heads * context * dim)))
    kv = [torch.randn(2, 1, heads, context, dim, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return graph_ms([lambda x=x: attend(q, x[0], x[1], enable_gqa=True) for x in kv])


def relative(x: Tensor, y: Tensor) -> float:
    """|| x - y || / || y ||; NaN stays NaN."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def row(bench: str, shape: str, context: int, ms: float, **others: Any) -> dict[str, Any]:
    fields = ("capacity", "dense_ms", "speedup", "bytes", "bandwidth_fraction", "error")
    result: dict[str, Any] = {"bench": bench, "shape": shape, "context": context, "batch": 1, "ms": round(ms, 5)}
    return {**result, **dict.fromkeys(fields), **others}


def save(rows: list[dict[str, Any]], path: Path, bandwidth: float) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    head |= {"commit": commit.strip(), "read_bandwidth": round(bandwidth / 1e12, 3)}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(r) for r in rows)
    path.write_text(json.dumps(head)[:-1] + ',\n "rows": [\n' + lines + "\n]}\n")
