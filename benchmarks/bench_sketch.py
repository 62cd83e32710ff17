"""The sketch scan and the row selection on a GPU: checked against the reference, then timed.

``PYTHONPATH=src python benchmarks/bench_sketch.py --out benchmarks/results/h200-sketch.json``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, dense_ms, graph_ms, read_bandwidth, relative, row, save

from hisparse.ops.scan import Chosen, reference
from hisparse.ops.scan import triton as twin
from hisparse.ops.sketch.triton import build_sketch
from hisparse.vtq.stats import ChannelStats, estimate_stats


class Case:
    """Sketches of one layer: keys with offset channels and needles, rows in random places of the pool."""

    def __init__(
        self, shape: str, context: int, row_size: int, bits: int, shuffle: bool = True, sets: int | None = None
    ):
        q_heads, heads, dim = SHAPES[shape]
        self.shape, self.context, self.row_size, self.bits = shape, context, row_size, bits
        self.rows, self.scaling = context // row_size, dim**-0.5
        make = torch.Generator("cuda").manual_seed(context + bits)
        mean = torch.randn(heads, dim, generator=make, device="cuda") * 4
        colour = torch.rand(heads, dim, generator=make, device="cuda") * 2 + 0.3
        self.q = torch.randn(1, q_heads, dim, generator=make, device="cuda").bfloat16() * 2
        self.codes, self.scales = [], []
        self.stats: ChannelStats | None = None
        per_token = heads * (dim * bits // 8 + 1)
        sets = sets or max(1, -(-(192 << 20) // (per_token * context)))
        for _ in range(sets):
            keys = torch.randn(self.rows, row_size, heads, dim, generator=make, device="cuda").bfloat16()
            keys *= colour
            at = torch.randint(0, self.rows, (64,), generator=make, device="cuda")
            group = self.q[0].view(heads, -1, dim)
            keys[at, 0] += group[:, :1].transpose(0, 1) * (16 / dim**0.5)
            keys += mean
            if self.stats is None:
                sample = keys[: 32768 // row_size].flatten(0, 1)
                self.stats = estimate_stats(sample.cpu(), sample.cpu(), torch.arange(dim)).to("cuda")
            codes, scales = build_sketch(keys, self.stats, bits)
            self.codes.append(codes.view(self.rows, -1))
            self.scales.append(scales.view(self.rows, -1))
            del keys
        order = (
            torch.randperm(self.rows, generator=make, device="cuda")
            if shuffle
            else torch.arange(self.rows, device="cuda")
        )
        self.table = order.to(torch.int32)[None]
        self.count = torch.tensor([self.rows], dtype=torch.int32, device="cuda")
        self.bytes = self.codes[0].nbytes + self.scales[0].nbytes + self.table.nbytes

    def scan(self, i: int = 0, tuning: twin.Tuning | None = None) -> torch.Tensor:
        where = (self.codes[i], self.scales[i], self.table, self.count)
        return twin.scan_rows(self.q, *where, self.stats, self.scaling, self.bits, tuning)

    def both(self, budget: int, i: int = 0, tuning: twin.Tuning | None = None) -> Chosen:
        where = (self.codes[i], self.scales[i], self.table, self.count)
        return twin.scan_and_select(self.q, *where, self.stats, self.scaling, self.bits, budget, None, tuning)

    def error(self, tuning: twin.Tuning | None = None) -> float:
        """Of the rows' worth, against the reference in float32; raises where the selections differ."""
        where = (self.codes[0], self.scales[0], self.table, self.count)
        expected = reference.scan_rows(self.q, *where, self.stats, self.scaling, self.bits)
        worth = self.scan(0, tuning)
        budget = min(4096, self.rows)
        chosen = self.both(budget, 0, tuning)
        mine = set(chosen.rows[0, : int(chosen.count)].tolist())
        best = set(self.table[0, worth[0].topk(budget).indices].tolist())
        exact = set(self.table[0, expected[0].topk(budget).indices].tolist())
        if len(mine) != budget or len(mine & best) < budget - 2:
            raise SystemExit(f"selection differs: {len(mine)} rows, {len(mine & best)} of the best {budget}")
        if len(mine & exact) < 0.99 * budget:
            raise SystemExit(f"scan loses rows: {len(mine & exact)} of {budget}")
        error = relative(worth, expected)
        if not error < 5e-3:
            raise SystemExit(f"scan is wrong: relative error {error:.2e}")
        return error


def profile(case: Case, tuning: twin.Tuning | None) -> None:
    """Device time of each kernel of one step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    budget = 4096
    case.both(budget, 0, tuning)
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as result:
        for i in range(8):
            case.both(budget, i % len(case.codes), tuning)
        torch.cuda.synchronize()
    times = {e.key: e.self_device_time_total / 8 for e in result.key_averages() if e.self_device_time_total}
    print("  us a step: " + ", ".join(f"{k.split('(')[0][:24]} {v:.1f}" for k, v in times.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="The sketch scan and the row selection.")
    parser.add_argument("--shapes", nargs="+", default=["glm4-9b-1m", "llama3.1-8b"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1 << 20, 1 << 17])
    parser.add_argument("--rows", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--tunings", default="[{}]", help="JSON list of tunings to try; the fastest is reported")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--warm", action="store_true", help="compile and check only, on few rows")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tunings = [twin.Tuning(**t) for t in json.loads(options.tunings)]
    if options.warm:
        for shape in options.shapes:
            for row_size in options.rows:
                for bits in options.bits:
                    case = Case(shape, 1 << 16, row_size, bits, sets=1)
                    for tuning in tunings:
                        case.error(tuning)
        return
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        for context in options.contexts:
            dense = dense_ms(shape, context)
            for row_size in options.rows:
                for bits in options.bits:
                    case = Case(shape, context, row_size, bits)
                    name = f"{row_size} tokens a row, {bits} bits"
                    found: list[tuple[float, float, twin.Tuning]] = []
                    for tuning in tunings:
                        error = case.error(tuning)
                        runs = [lambda i=i, t=tuning: case.scan(i, t) for i in range(len(case.codes))]
                        found.append((graph_ms(runs), error, tuning))
                    if len(found) > 1:
                        print("   ", " ".join(f"{1e3 * f[0]:.1f}" for f in found))
                    ms, error, tuning = min(found, key=lambda f: f[0])
                    part = case.bytes / ms * 1e3 / bandwidth
                    shared = {"dense_ms": round(dense, 4), "error": float(f"{error:.2e}"), "what": name}
                    rows.append(
                        row("sketch-scan", shape, context, ms, bytes=case.bytes, bandwidth_fraction=round(part, 3),
                            speedup=round(dense / ms, 2), **shared)
                    )  # fmt: skip
                    times = []
                    for budget in (2048, 4096, 16384):
                        if budget > case.rows:
                            continue
                        both = graph_ms([lambda i=i, b=budget: case.both(b, i, tuning) for i in range(len(case.codes))])
                        times.append(f"{budget}: {1e3 * both:.1f}")
                        rows.append(
                            row("sketch-scan+select", shape, context, both, bytes=case.bytes, budget=budget,
                                bandwidth_fraction=round(case.bytes / both * 1e3 / bandwidth, 3),
                                speedup=round(dense / both, 2), **shared)
                        )  # fmt: skip
                    print(
                        f"{shape} {context} {name}: scan {1e3 * ms:.1f} us, {part:.0%}; with selection {', '.join(times)} us; "
                        f"dense {1e3 * dense:.0f}; error {error:.1e}", flush=True
                    )  # fmt: skip
                    if options.profile:
                        profile(case, tuning)
                    if bits == options.bits[0] and row_size == options.rows[0]:
                        worth = case.scan()
                        alone = graph_ms([lambda: twin.select_top(worth, case.table, case.count, 4096, None)])
                        torch_ms = graph_ms([lambda: worth.topk(4096, sorted=False)])
                        rows.append(row("select", shape, context, alone, budget=4096, torch_topk_ms=round(torch_ms, 5)))
                        print(f"    select 4096 of {case.rows}: {1e3 * alone:.1f} us, torch.topk {1e3 * torch_ms:.1f}")
                    del case
    if options.out:
        save(rows, options.out, bandwidth)


if __name__ == "__main__":
    main()
