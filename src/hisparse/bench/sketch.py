"""The sketch scan and the row selection of a decode step: worth against the reference first, then time and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hisparse.bench.measure import WrongResult, check, dense_decode_ms, graph_ms, relative
from hisparse.bench.results import make_row
from hisparse.bench.shapes import SHAPES, Shape
from hisparse.bench.twins import name_of, twin
from hisparse.ops.scan import Chosen
from hisparse.ops.scan import reference as plain
from hisparse.vtq.stats import ChannelStats, estimate_stats

TOLERANCE = 5e-3  # of worth, against the reference in float32: the roots are kept in bfloat16
COPIES_BYTES = 192 << 20  # of sketches that the timed calls go through, several times the L2 cache
VARIANTS: dict[str, tuple[dict[str, int], ...]] = {
    "cuda": (
        {},
        {"stages": 1},
        {"warps": 16},
        {"warps": 16, "stages": 1, "weights": 4},
        {"warps": 16, "weights": 4},
        {"warps": 16, "weights": 4, "stages": 3},
        {"warps": 20, "weights": 4},
        {"whole": False},
        {"overlap": False},
        {"once": False},
    ),
    "triton": ({"stages": 3}, {"shared": 2, "stages": 3}),
}
"""Settings tried beside a twin's own."""


class SketchCase:
    """Sketches of one layer: keys with offset channels and needles, rows in random places of the pool.

    `copies` of the pool, 0 for as many as exceed the L2 cache: a timed loop goes through them in turn.
    """

    def __init__(
        self,
        shape: Shape,
        context: int,
        row_size: int,
        bits: int,
        device: torch.device,
        build: ModuleType,
        copies: int = 0,
    ) -> None:
        heads, dim = shape.heads, shape.dim
        self.row_size, self.bits, self.rows, self.scaling = row_size, bits, context // row_size, dim**-0.5
        make = torch.Generator(device).manual_seed(context + bits)
        mean = torch.randn(heads, dim, generator=make, device=device) * 4
        colour = torch.rand(heads, dim, generator=make, device=device) * 2 + 0.3
        self.q = torch.randn(1, shape.q_heads, dim, generator=make, device=device).bfloat16() * 2
        self.codes: list[Tensor] = []
        self.scales: list[Tensor] = []
        stats: ChannelStats | None = None
        token = heads * (dim * bits // 8 + 1)
        for _ in range(copies or max(1, -(-COPIES_BYTES // (token * context)))):
            keys = torch.randn(self.rows, row_size, heads, dim, generator=make, device=device).bfloat16()
            keys *= colour
            at = torch.randint(0, self.rows, (64,), generator=make, device=device)
            group = self.q[0].view(heads, -1, dim)
            keys[at, 0] += group[:, :1].transpose(0, 1) * (16 / dim**0.5)
            keys += mean
            if stats is None:
                sample = keys[: 32768 // row_size].flatten(0, 1).cpu()
                stats = estimate_stats(sample, sample, torch.arange(dim)).to(device)
            codes, scales = build.build_sketch(keys, stats, bits)
            self.codes.append(codes.flatten(1))
            self.scales.append(scales.flatten(1))
        self.keys = keys
        assert stats is not None
        self.stats = stats
        self.table = torch.randperm(self.rows, generator=make, device=device).to(torch.int32)[None]
        self.count = torch.tensor([self.rows], dtype=torch.int32, device=device)
        self.bytes = self.codes[0].nbytes + self.scales[0].nbytes + self.table.nbytes

    def scan(self, module: ModuleType, copy: int = 0, tuning: Any = None) -> Tensor:
        where = (self.codes[copy], self.scales[copy], self.table, self.count)
        worth: Tensor = module.scan_rows(self.q, *where, self.stats, self.scaling, self.bits, tuning)
        return worth

    def choose(self, module: ModuleType, budget: int, copy: int = 0, tuning: Any = None) -> Chosen:
        where = (self.codes[copy], self.scales[copy], self.table, self.count)
        chosen: Chosen = module.scan_and_select(
            self.q, *where, self.stats, self.scaling, self.bits, budget, None, tuning
        )
        return chosen

    def scans(self, module: ModuleType, tuning: Any = None) -> list[Callable[[], object]]:
        """A scan of each copy, to be timed together."""
        return [partial(self.scan, module, i, tuning) for i in range(len(self.codes))]

    def choices(self, module: ModuleType, budget: int, tuning: Any = None) -> list[Callable[[], object]]:
        return [partial(self.choose, module, budget, i, tuning) for i in range(len(self.codes))]

    def error(self, module: ModuleType, tuning: Any = None) -> float:
        """Relative, of worth. Raises WrongResult where it, or the selection, is not the reference's."""
        where = (self.codes[0], self.scales[0], self.table, self.count)
        expected = plain.scan_rows(self.q, *where, self.stats, self.scaling, self.bits)
        worth = self.scan(module, 0, tuning)
        budget = min(4096, self.rows)
        chosen = self.choose(module, budget, 0, tuning)
        mine = set(chosen.rows[0, : int(chosen.number)].tolist())
        best = set(self.table[0, worth[0].topk(budget).indices].tolist())
        exact = set(self.table[0, expected[0].topk(budget).indices].tolist())
        if len(mine) != budget or len(mine & best) < budget - 2:  # topk breaks ties in its own way
            raise WrongResult(f"selection: {len(mine)} rows, {len(mine & best)} of the best {budget}")
        if len(mine & exact) < 0.99 * budget:
            raise WrongResult(f"scan and selection: {len(mine & exact)} of the reference's best {budget} rows")
        return check("scan", relative(worth, expected), TOLERANCE)


def run(
    name: str, context: int, device: torch.device, bandwidth: float, twin_name: str | None, tune: bool,
    row_sizes: tuple[int, ...] = (4, 8), bits: tuple[int, ...] = (2, 1), budgets: tuple[int, ...] = (3072, 4096, 16384),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows for building, the scan, and scan and selection. bandwidth: bytes a second that are read. Raises
    WrongResult."""
    shape = SHAPES[name]
    module, build = twin("scan", device, twin_name), twin("sketch", device)
    tunings: list[Any] = [None]
    if tune and hasattr(module, "Tuning"):
        tunings += [module.Tuning(**settings) for settings in VARIANTS[name_of(module)]]
    q = torch.randn(1, shape.q_heads, 1, shape.dim, dtype=torch.bfloat16, device=device)
    dense = dense_decode_ms(q, shape.heads, context)
    for row_size in row_sizes:
        for width in bits:
            what = f"{row_size} tokens a row, {width} bits"
            case = SketchCase(shape, context, row_size, width, device, build)
            errors = [case.error(module, tuning) for tuning in tunings]
            times = [graph_ms(case.scans(module, tuning)) for tuning in tunings]
            best = times.index(min(times))

            row = partial(
                _scan_row, name, context, bandwidth, twin=name_of(module), bytes=case.bytes, dense_ms=dense,
                error=errors[best],
            )  # fmt: skip
            variants = {str(t): round(ms, 5) for t, ms in zip(tunings, times, strict=True)}
            yield row("sketch-scan", times[best], what=what, **({"variants": variants} if tune else {}))
            for budget in budgets:
                if budget < case.rows:  # else all rows are taken and none is scored
                    ms = graph_ms(case.choices(module, budget, tunings[best]))
                    yield row("sketch-scan+select", ms, what=f"{what}, {budget} rows")
            if row_size == row_sizes[0] and width == bits[0]:
                yield _selection(case, module, name, context)
            ms = graph_ms([partial(build.build_sketch, case.keys, case.stats, width)])
            size = case.keys.nbytes + case.codes[0].nbytes + case.scales[0].nbytes
            yield make_row(
                "sketch-build", name, context, ms, what=what, twin=name_of(build), bytes=size,
                bandwidth_fraction=round(size / ms * 1e3 / bandwidth, 3),
            )  # fmt: skip


def _scan_row(name: str, context: int, bandwidth: float, bench: str, ms: float, **others: Any) -> dict[str, Any]:
    part = round(others["bytes"] / ms * 1e3 / bandwidth, 3)
    return make_row(bench, name, context, ms, bandwidth_fraction=part, **others)


def _selection(case: SketchCase, module: ModuleType, name: str, context: int, budget: int = 4096) -> dict[str, Any]:
    """The choice alone, of worth that is there."""
    worth = case.scan(module)
    budget = min(budget, case.rows)
    ms = graph_ms([partial(module.select_top, worth, case.table, case.count, budget, None)])
    theirs = graph_ms([partial(worth.topk, budget, sorted=False)])
    what = f"{budget} of {case.rows} rows"
    return make_row("select", name, context, ms, what=what, twin=name_of(module), torch_topk_ms=round(theirs, 5))


def profile(case: SketchCase, module: ModuleType, budget: int = 4096, steps: int = 8) -> dict[str, float]:
    """Microseconds of each kernel of one step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    case.choose(module, budget)
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as result:
        for i in range(steps):
            case.choose(module, budget, i % len(case.codes))
        torch.cuda.synchronize()
    return {
        event.key.split("(")[0]: round(event.self_device_time_total / steps, 1)
        for event in result.key_averages()
        if event.self_device_time_total
    }
