"""Speed of decode attention over packed pages against dense attention: ``python benchmarks/bench_decode.py``.

Everything is measured in one run on one card: the result is checked against float64 first (a wrong one prints no
speed), then timed as replays of a CUDA graph that rotates over buffers together larger than the L2 cache, beside
`scaled_dot_product_attention(enable_gqa=True)` on dense bfloat16 K and V of the same tokens and beside the card's read
bandwidth."""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hisparse.ops.decode import DecodeResult, Pages
from hisparse.ops.decode.triton import Tuning, decode_attention
from hisparse.ops.pack import pack_pages
from hisparse.ops.unpack import unpack_pages
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats, estimate_stats

SHAPES = {  # query heads, KV heads, head_dim
    "glm4-9b-1m": (32, 4, 128),
    "llama3.1-8b": (32, 8, 128),
    "qwen2.5-7b-1m": (28, 4, 128),
    "qwen2.5-72b": (64, 8, 128),
    "qwen2.5-0.5b": (14, 2, 64),
}
SLOTS = 148
TOLERANCE = 8e-3  # of the bfloat16 output, against float64
CHUNK = 1 << 16


@triton.jit
def _read_all(p_x, p_out, n_block, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(tl.program_id(0), n_block, tl.num_programs(0)):
        total += tl.load(p_x + i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(p_out + tl.program_id(0), tl.sum(total, 0))


def read_bandwidth(device: torch.device, size: int = 1 << 31) -> float:
    """Bytes a second of a kernel that only reads; the best of a few shapes."""
    x = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    best = float("inf")
    for block, warps, programs in ((4096, 8, 132 * 8), (8192, 8, 132 * 4), (2048, 4, 132 * 16)):
        out = x.new_empty(programs)
        run = functools.partial(_read_all[(programs,)], x, out, len(x) // block, block, num_warps=warps)
        best = min(best, milliseconds([run]))
    return size / best * 1e3


def milliseconds(calls: list[Callable[[], Any]], repeats: int = 7, target_ms: float = 12.0) -> float:
    """Median time of one call: replays of a graph in which `calls` follow each other, again and again."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(50, int(target_ms / begin.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / (rounds * len(calls)))
    return sorted(times)[repeats // 2]


@dataclass
class Layer:
    """K and V of one layer, dense and packed, and queries."""

    q: Tensor
    k: Tensor  # [1, H, N, D]
    v: Tensor
    dense: Tensor  # [2, 1, H, S, D], sinks and tail
    pool: Tensor
    table: Tensor  # [N / P], shuffled
    fmt: PageFormat
    stats: ChannelStats

    def pages(self, first: int, tokens: int) -> Pages:
        """Pages of `tokens` tokens from token `first` on."""
        size = self.fmt.tokens
        table = self.table[None, first // size : (first + tokens) // size]
        count = torch.tensor([table.shape[1]], dtype=torch.int32, device=table.device)
        return Pages(self.pool, table.contiguous(), count, self.fmt)


def make_layer(shape: tuple[int, int, int], context: int, page_size: int, group: int, device: torch.device) -> Layer:
    """Keys with channels of large constant offsets and unequal spread, values with some; a few needles that q turns
    to."""
    q_heads, heads, dim = shape
    make = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=make, device=device)

    offset, spread = normal(2, 1, heads, dim) * 0.5, (normal(2, 1, heads, dim) * 0.5).exp()
    offset[0, :, :, ::9] *= 20
    q = normal(1, q_heads, dim).to(torch.bfloat16)
    k, v = (torch.empty(1, heads, context, dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    fmt = PageFormat(page_size, heads, dim, 5, 5, min(group, dim))
    order = torch.argsort(torch.arange(dim, device=device) // (dim // 4) % 2, descending=True, stable=True)
    table = torch.randperm(context // page_size, generator=make, device=device).int()
    pool = torch.empty(context // page_size, fmt.page_bytes, dtype=torch.uint8, device=device)
    stats: ChannelStats | None = None
    toward = q.float().view(heads, -1, dim).mean(1)
    for start in range(0, context, CHUNK):
        count = min(CHUNK, context - start)
        new_k, new_v = (normal(count, heads, dim) * spread[i] + offset[i] for i in range(2))
        new_k[:: CHUNK // 4] += 2 * toward
        new_k, new_v = new_k.to(torch.bfloat16), new_v.to(torch.bfloat16)
        if stats is None:
            stats = estimate_stats(new_k, new_v, order)
        pages = pack_pages(
            new_k.view(-1, page_size, heads, dim), new_v.view(-1, page_size, heads, dim), stats, fmt, "rope"
        )
        pool[table[start // page_size : (start + count) // page_size].long()] = pages
        k[0, :, start : start + count] = new_k.transpose(0, 1)
        v[0, :, start : start + count] = new_v.transpose(0, 1)
    assert stats is not None
    dense = torch.stack([k[:, :, :SLOTS], v[:, :, :SLOTS]])
    return Layer(q, k, v, dense, pool, table, fmt, stats)


def exact(layer: Layer, pages: Pages, scaling: float) -> Tensor:
    """The same attention from unpacked pages in float64, chunk by chunk: [Hq, D]."""
    q_heads, dim = layer.q.shape[1:]
    heads = layer.fmt.heads
    q = layer.q[0].double().view(heads, -1, dim) * scaling
    parts = [layer.dense[:, 0].double()]
    chunks: list[tuple[Tensor, Tensor]] = []
    step = CHUNK // layer.fmt.tokens
    for start in range(-step, pages.table.shape[1], step):
        if start < 0:
            k, v = parts[0]
        else:
            stored = pages.pool[pages.table[0, start : start + step].long()]
            k, v = (
                x.permute(2, 0, 1, 3).reshape(heads, -1, dim).double()
                for x in unpack_pages(stored, layer.stats, layer.fmt, torch.float32)
            )
        scores = torch.einsum("hgd,hnd->hgn", q, k)
        lse = scores.logsumexp(-1)
        chunks.append((lse, torch.einsum("hgn,hnd->hgd", (scores - lse[..., None]).exp(), v)))
    weights = torch.stack([c[0] for c in chunks]).softmax(0)
    return (weights[..., None] * torch.stack([c[1] for c in chunks])).sum(0).view(q_heads, dim)


def run(
    layer: Layer, pages: Pages, length: Tensor, scaling: float, split: str | None, tuning: Tuning | None
) -> DecodeResult:
    return decode_attention(
        layer.q, *layer.dense, length, pages, None, layer.stats, scaling, None, None, False, split, tuning
    )


def bench(
    name: str,
    layer: Layer,
    context: int,
    bandwidth: float,
    split: str | None,
    tunings: list[Tuning | None],
) -> Iterator[dict[str, Any]]:
    """One row for each tuning that gives the right result; raises RuntimeError for one that does not."""
    dim = layer.q.shape[2]
    scaling = dim**-0.5
    length = torch.tensor([SLOTS], dtype=torch.int32, device=layer.q.device)
    total = layer.k.shape[2]
    sets = max(1, min(8, total // context))
    pages = [layer.pages(i * context, context) for i in range(sets)]
    dense_calls = [
        functools.partial(
            scaled_dot_product_attention,
            layer.q[:, :, None],
            layer.k[:, :, i * context : (i + 1) * context],
            layer.v[:, :, i * context : (i + 1) * context],
            scale=scaling,
            enable_gqa=True,
        )
        for i in range(sets)
    ]
    dense_ms = milliseconds(dense_calls)
    want = exact(layer, pages[0], scaling)
    for tuning in tunings:
        try:
            got = run(layer, pages[0], length, scaling, split, tuning).out[0].double()
        except triton.runtime.errors.OutOfResources as error:
            print(f"{tuning}: {error}")
            continue
        error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
        if not error <= TOLERANCE:
            raise RuntimeError(
                f"{name} {context} {tuning}: relative error {error:.2e} > {TOLERANCE:.0e}; no speed is given"
            )
        calls = [functools.partial(run, layer, p, length, scaling, split, tuning) for p in pages]
        ms = milliseconds(calls)
        size = pages[0].table.shape[1] * layer.fmt.page_bytes + layer.dense[0].nbytes * 2
        yield {
            "bench": "decode",
            "shape": name,
            "context": context,
            "batch": 1,
            "capacity": round(context * layer.fmt.heads * dim * 4 / size, 3),
            "page_size": layer.fmt.tokens,
            "group": layer.fmt.group,
            "split": split or "any",
            "ms": round(ms, 5),
            "dense_ms": round(dense_ms, 5),
            "speedup": round(dense_ms / ms, 3),
            "bytes": size,
            "bandwidth_fraction": round(size / ms * 1e3 / bandwidth, 4),
            "error": float(f"{error:.2e}"),
            "tuning": str(tuning or Tuning()),
        }


def save(rows: list[dict[str, Any]], bandwidth: float, folder: Path, commit: str) -> Path:
    """Write `<gpu>-<date>.json`; rows of other benches that are there already stay."""
    gpu = torch.cuda.get_device_name().replace("NVIDIA ", "").replace(" ", "-").lower()
    path = folder / f"{gpu}-{datetime.date.today()}.json"
    old = json.loads(path.read_text()) if path.exists() else {"rows": []}
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "read_bandwidth": round(bandwidth),
        "rows": [row for row in old["rows"] if row["bench"] != "decode"] + rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode attention over packed pages against dense attention.")
    parser.add_argument("--shapes", nargs="*", default=["glm4-9b-1m", "llama3.1-8b"], choices=list(SHAPES))
    parser.add_argument("--contexts", nargs="*", type=int, default=[1 << 17, 1 << 20])
    parser.add_argument("--page-sizes", nargs="*", type=int, default=[8, 64])
    parser.add_argument("--groups", nargs="*", type=int, default=[64], help="channels that share a step and a zero")
    parser.add_argument("--split", default="rope", choices=["rope", "any"])
    parser.add_argument(
        "--tune", nargs="*", default=[], help="block,warps,stages,programs[,registers] of variants to time"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", default=None)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    commit = arguments.commit
    if commit is None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    tunings: list[Tuning | None] = [Tuning(*map(int, text.split(","))) for text in arguments.tune] or [None]
    bandwidth = read_bandwidth(device)
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    rows = []
    for name in arguments.shapes:
        for page_size, group in itertools.product(arguments.page_sizes, arguments.groups):
            layer = make_layer(SHAPES[name], max(arguments.contexts), page_size, group, device)
            for context in arguments.contexts:
                split = None if arguments.split == "any" else arguments.split
                for row in bench(name, layer, context, bandwidth, split, tunings):
                    rows.append(row)
                    print(
                        f"{name:12s} {context:8d} page {page_size:2d} group {group:3d} {row['ms']:8.4f} ms, "
                        f"dense {row['dense_ms']:.4f}: "
                        f"{row['speedup']:5.2f} x, {100 * row['bandwidth_fraction']:5.1f} % of read, "
                        f"error {row['error']:.1e} {row['tuning'] if arguments.tune else ''}",
                        flush=True,
                    )
            del layer
    print("written to", save(rows, bandwidth, arguments.out, commit))


if __name__ == "__main__":
    main()
