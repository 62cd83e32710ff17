"""The sketch scan and the row selection on a GPU: checked against the reference, then timed.

``PYTHONPATH=src python benchmarks/bench_sketch.py --out benchmarks/results/h200-sketch.json``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
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
        mine = set(chosen.rows[0, : int(chosen.number)].tolist())
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


def scan_runs(case: Case, tuning: twin.Tuning | None) -> list[Callable[[], object]]:
    """A scan of each of the case's copies."""
    return [lambda i=i: case.scan(i, tuning) for i in range(len(case.codes))]  # type: ignore[misc]


def both_runs(case: Case, budget: int, tuning: twin.Tuning | None) -> list[Callable[[], object]]:
    return [lambda i=i: case.both(budget, i, tuning) for i in range(len(case.codes))]  # type: ignore[misc]


def time_case(case: Case, tunings: list[twin.Tuning | None], dense: float, bandwidth: float) -> list[dict[str, Any]]:
    """Rows of the scan alone, with the fastest of `tunings`, and with selection."""
    name = f"{case.row_size} tokens a row, {case.bits} bits"
    errors = [case.error(tuning) for tuning in tunings]
    times = [graph_ms(scan_runs(case, tuning)) for tuning in tunings]
    if len(times) > 1:
        print("    tunings, us:", " ".join(f"{1e3 * ms:.1f}" for ms in times))
    best = times.index(min(times))
    ms, tuning = times[best], tunings[best]
    shared = {"what": name, "bytes": case.bytes, "dense_ms": round(dense, 4), "error": float(f"{errors[best]:.2e}")}
    if tuning is not None:
        shared["tuning"] = asdict(tuning)

    def entry(bench: str, ms: float, **others: Any) -> dict[str, Any]:
        part = round(case.bytes / ms * 1e3 / bandwidth, 3)
        return row(
            bench,
            case.shape,
            case.context,
            ms,
            bandwidth_fraction=part,
            speedup=round(dense / ms, 2),
            **shared,
            **others,
        )

    rows = [entry("sketch-scan", ms)]
    for budget in (2048, 4096, 16384):
        if budget <= case.rows:
            rows.append(entry("sketch-scan+select", graph_ms(both_runs(case, budget, tuning)), budget=budget))
    selected = ", ".join(f"{r['budget']}: {1e3 * r['ms']:.1f}" for r in rows[1:])
    print(
        f"{case.shape} {case.context} {name}: scan {1e3 * ms:.1f} us, {rows[0]['bandwidth_fraction']:.0%}; "
        f"with selection {selected} us; dense {1e3 * dense:.0f}; error {errors[best]:.1e}",
        flush=True,
    )
    return rows


def time_selection(case: Case, budget: int = 4096) -> dict[str, Any]:
    worth = case.scan()
    ours = graph_ms([lambda: twin.select_top(worth, case.table, case.count, budget, None)])
    theirs = graph_ms([lambda: worth.topk(budget, sorted=False)])
    print(f"    select {budget} of {case.rows}: {1e3 * ours:.1f} us, torch.topk {1e3 * theirs:.1f}")
    return row("select", case.shape, case.context, ours, budget=budget, torch_topk_ms=round(theirs, 5))


def main() -> None:
    parser = argparse.ArgumentParser(description="The sketch scan and the row selection.")
    parser.add_argument("--shapes", nargs="+", default=["glm4-9b-1m", "llama3.1-8b"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1 << 20, 1 << 17])
    parser.add_argument("--rows", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--tunings", help="JSON list of tunings to try, of which the fastest is reported")
    parser.add_argument("--ordered", action="store_true", help="rows in order of position, not in random places")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--warm", action="store_true", help="compile and check only, on few rows")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tunings = [twin.Tuning(**t) for t in json.loads(options.tunings)] if options.tunings else [None]
    variants = [(r, b) for r in options.rows for b in options.bits]
    if options.warm:
        for shape in options.shapes:
            for row_size, bits in variants:
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
            for row_size, bits in variants:
                case = Case(shape, context, row_size, bits, shuffle=not options.ordered)
                rows += time_case(case, tunings, dense, bandwidth)
                if options.profile:
                    profile(case, tunings[0])
                if (row_size, bits) == variants[0]:
                    rows.append(time_selection(case))
                del case
    if options.out:
        save(rows, options.out, bandwidth)


if __name__ == "__main__":
    main()
