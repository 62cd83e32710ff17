"""A whole decode step with recall: scan, selection, rows from the host through the hot buffer, attention over it all.

Queries drift as a model's do: neighbouring steps share most of their rows, and most of what is new was wanted a few
steps before. How far they drift is set so that the share that repeats is the one measured on real models.

With a scan interval of n every n-th step is such a step, in all layers, and those in between attend to all that the hot
buffer holds, as `BatchedDecode` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hisparse.bench.data import float64_attention, make_layer
from hisparse.bench.measure import L2_BYTES, check, dense_decode_ms, graph_ms
from hisparse.bench.past import Past
from hisparse.bench.results import make_row
from hisparse.bench.shapes import SHAPES
from hisparse.cache.decode import RecallRows, bring_rows, choose_rows, held_pages, recall_step
from hisparse.errors import InputError
from hisparse.ops.decode import Pages, decode_attention
from hisparse.ops.fetch import HotBuffer
from hisparse.ops.scan import Chosen

TOLERANCE = 8e-3  # of the bfloat16 output, against float64
REPEATS = 0.72  # of a step's rows, that the next step wants too
STEPS = 96
WARM = 32  # steps before the measured ones: the hot buffer fills
INTERVALS = [n for n in range(1, STEPS + 1) if STEPS % n == 0]
"""Scan intervals of which the measured steps hold a whole number."""


class Steps:
    """A layer at a capacity, and the queries of a stretch of decoding."""

    def __init__(self, past: Past, drift: float | None = None) -> None:
        device, layer = past.dense_k.device, past.layer
        self.past = past
        self.dense_k, self.dense_v = (x[None].contiguous() for x in (past.dense_k, past.dense_v))
        self.length = torch.tensor([past.dense_k.shape[1]], dtype=torch.int32, device=device)
        pages = len(past.kept_pages)
        table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        self.kept = Pages(past.kept_pages, table, self._count(pages), past.kept_format)
        self.table = past.ids.to(device).int()[None].contiguous()
        self.hot = HotBuffer.empty((max(past.hot_rows, past.budget),), past.row_format.page_bytes, past.rows, device)
        # The pools are indexed by row id, as the rows themselves are.
        codes, scales = (torch.empty_like(x) for x in (past.codes, past.scales))
        codes[past.ids], scales[past.ids] = past.codes, past.scales
        rows = RecallRows(
            codes.flatten(1), scales.flatten(1), self.table, self._count(past.rows), past.source, past.row_format,
            past.bits,
        )  # fmt: skip
        # Made once: a captured step may not make tensors of what the host knows.
        self.rows = {False: rows, True: replace(rows, hot=self.hot)}
        self.held: Pages | None = None  # what the hot buffer holds since the last scan
        make = torch.Generator(device).manual_seed(5)
        self._noise = torch.randn(STEPS + WARM + 1, *layer.q.shape, generator=make, device=device)
        self.drift = self._settle() if drift is None else drift
        self.queries = self._drifting(self.drift)

    def _count(self, number: int) -> Tensor:
        return torch.tensor([number], dtype=torch.int32, device=self.length.device)

    def _drifting(self, fast: float) -> Tensor:
        """bfloat16 [steps, Hq, D]: a slow walk, and on top of it what is different in each step."""
        walk = [self._noise[-1]]
        for noise in self._noise[:-1]:
            walk.append(walk[-1] * (1 - 1e-3) + noise * (2e-3) ** 0.5 * 0.5)
        slow = torch.stack(walk[1:])
        drifting: Tensor = (1 - fast * fast) ** 0.5 * slow + fast * self._noise[:-1].flip(0)
        return drifting.to(torch.bfloat16)

    def _settle(self) -> float:
        """The share of the query that is new in each step, by bisection on the rows that two steps share."""
        low, high = 0.0, 1.0
        for _ in range(7):
            self.queries = self._drifting((low + high) / 2)
            low, high = ((low + high) / 2, high) if self.repeats(4) > REPEATS else (low, (low + high) / 2)
        return (low + high) / 2

    def choose(self, q: Tensor) -> Chosen:
        past = self.past
        return choose_rows(q[None], self.rows[False], past.layer.stats, past.scaling, past.budget)

    def repeats(self, steps: int, window: int = 1) -> float:
        """Share of a step's rows that one of the `window` steps before wanted."""
        sets = [set(self.choose(self.queries[i]).rows[0].tolist()) for i in range(steps + window)]
        shares = [len(sets[i] & set().union(*sets[i - window : i])) / len(sets[i]) for i in range(window, len(sets))]
        return sum(shares) / len(shares)

    def scan(self, q: Tensor) -> Tensor:
        """[1, Hq, D]: a step that scans."""
        past, self.held = self.past, None
        return recall_step(
            q[None], self.dense_k, self.dense_v, self.length, self.kept, self.rows[True], past.layer.stats,
            past.scaling, past.budget, split="rope",
        ).out  # fmt: skip

    def repeat(self, q: Tensor) -> Tensor:
        """[1, Hq, D]: a step between scans; the first after a scan lists what the hot buffer holds."""
        if self.held is None:
            self.held = held_pages(self.rows[True])
        return self.attend(q, self.held)

    def scans(self, index: int, interval: int) -> bool:
        """Whether step `index` scans; the first measured one does."""
        return (index - WARM) % interval == 0

    def step(self, index: int, interval: int = 1) -> Tensor:
        """[1, Hq, D]: the step of query `index`."""
        return (self.scan if self.scans(index, interval) else self.repeat)(self.queries[index])

    def attend(self, q: Tensor, recalled: Pages) -> Tensor:
        """[1, Hq, D]: the last part of a step."""
        past = self.past
        return decode_attention(
            q[None], self.dense_k, self.dense_v, self.length, self.kept, recalled, past.layer.stats, past.scaling,
            split="rope",
        ).out  # fmt: skip

    def recalled(self, index: int, interval: int = 1) -> Tensor:
        """int64 [n]: the rows that step `index` recalls, by their numbers in the pool; to be asked after the step."""
        if not self.scans(index, interval):
            return self.hot.owner[self.hot.owner >= 0].long()
        chosen = self.choose(self.queries[index])
        return chosen.rows[0, : int(chosen.number)].long()

    def error(self, index: int, interval: int = 1, found: Tensor | None = None) -> float:
        """Greatest relative error of a head's output in step `index`, taken now unless its output `found` is given,
        against float64 over the rows that it recalls, as the host has them."""
        past, q = self.past, self.queries[index]
        result = (self.step(index, interval) if found is None else found)[0].double()
        place = torch.empty(past.rows, dtype=torch.int64, device=q.device)
        place[past.ids] = torch.arange(past.rows, device=q.device)
        packed = past.chosen(place[self.recalled(index, interval)])
        want = float64_attention(q.view(past.dense_k.shape[0], -1, q.shape[1]), past.slices(packed), past.scaling)
        want = want.flatten(0, 1)
        return float(((result - want).norm(dim=-1) / want.norm(dim=-1)).max())


def replay_ms(
    layers: Sequence[Callable[[int], Any]], counters: Sequence[Tensor] = ()
) -> tuple[float, Tensor | None, list[Any]]:
    """Milliseconds a step of one layer; by how much `counters` rose in all; and what each layer's last step gave.

    One CUDA graph has all steps but the first `WARM`, as a captured model runs its layers one after the other. layers:
    what each does in the step of a number. The eager steps ahead compile what the graphs hold.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in (WARM, WARM + 1):
            for layer in layers:
                layer(index)
    torch.cuda.synchronize()
    graphs, last = [], []
    for steps in (range(WARM), range(WARM, WARM + STEPS)):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for index in steps:
                last = [layer(index) for layer in layers]
    before = None
    for timed in (False, True):  # a graph's first replay takes longer
        graphs[0].replay()
        before = torch.stack(list(counters)) if counters else None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graphs[1].replay()
        end.record()
        torch.cuda.synchronize()
        if timed:
            rose = None if before is None else (torch.stack(list(counters)) - before).sum(0)
            return float(begin.elapsed_time(end)) / STEPS / len(layers), rose, last
    raise AssertionError


def run(
    name: str,
    context: int,
    capacities: list[float],
    bits: list[int],
    page_sizes: list[int],
    intervals: list[int],
    device: torch.device,
    read: float,
    pinned: float,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """A row for each capacity, width of sketches, number of kept tokens a page and scan interval. read, pinned: bytes a
    second of the device's and the host's memory. say: is told what cannot be, and why. Raises WrongResult, and
    InputError for an interval that is not among INTERVALS."""
    for interval in intervals:
        if interval not in INTERVALS:
            raise InputError(
                f"--scan-interval {interval} does not divide the {STEPS} steps that are measured; use one of "
                f"{', '.join(map(str, INTERVALS))}"
            )
    layer = make_layer(SHAPES[name], context, device)
    dense = dense_decode_ms(layer.q[None, :, None], SHAPES[name].heads, context)
    for width, capacity, page_size in product(bits, capacities, page_sizes):
        what = f"capacity {capacity:g}, {width}-bit sketches, {page_size} tokens a page"
        try:
            past = Past(name, layer, context, capacity, True, width, page_size)
            if not past.hot_rows:
                raise InputError(
                    f"no room for a hot buffer at {context} tokens; lower the capacity, or use 1-bit sketches"
                )
        except InputError as error:
            say(f"recall {name} {context}, {what}: left out: {error}")
            continue
        yield from _measure(past, what, intervals, dense, read, pinned)


def _measure(
    past: Past, what: str, intervals: list[int], dense: float, read: float, pinned: float
) -> Iterator[dict[str, Any]]:
    """The whole step at each interval, and the parts of a step that scans and of one that does not."""
    name, context = past.name, past.context
    steps = Steps(past)
    # What a step leaves in the L2 cache, other layers replace in a model: here, too.
    layers = max(2, min(8, -(-L2_BYTES // (2 * past.device_bytes))))
    every = [steps, *(Steps(past.again(), steps.drift) for _ in range(layers - 1))]
    row_bytes = past.row_format.page_bytes
    scanned = past.codes.nbytes + past.scales.nbytes + 4 * past.rows + past.budget * row_bytes
    for interval in intervals:
        full = what if interval == 1 else f"{what}, a scan every {interval} steps"
        first = f"recall {name} {context} {full}"
        error = max(steps.error(WARM + i, interval) for i in range(max(3, min(interval, 4))))
        error = check(first, error, TOLERANCE)
        ms, rose, last = replay_ms(
            [partial(each.step, interval=interval) for each in every], [each.hot.counters for each in every]
        )
        replayed = (each.error(WARM + STEPS - 1, interval, out) for each, out in zip(every, last, strict=True))
        error = max(error, check(f"{first}, captured", max(replayed), TOLERANCE))
        assert rose is not None
        found, missed = rose[0].tolist()
        held = held_pages(steps.rows[True])
        size = past.kept_pages.nbytes + (scanned + (interval - 1) * int(held.count[0]) * row_bytes) / interval
        parts = _scanning(every, pinned) if interval == 1 else _between(steps, held)
        yield make_row(
            "recall", name, context, ms, what=full, scan_interval=interval, capacity=round(past.capacity, 2),
            dense_ms=dense, bytes=round(size), bandwidth_fraction=round(size / ms * 1e3 / read, 4), error=error,
            rows=past.budget, hot_rows=past.hot_rows, hit_rate=round(found / (found + missed), 4), layers=layers,
            host_bytes=round(missed / (found + missed) * past.budget * row_bytes / interval), **parts,
        )  # fmt: skip


def _scanning(every: list[Steps], pinned: float) -> dict[str, Any]:
    """The parts of a step that scans, each by itself, and how far queries drift."""
    steps = every[0]
    past = steps.past
    scan, _, _ = replay_ms([lambda index, each=each: each.choose(each.queries[index]) for each in every])  # type: ignore[misc]
    chosen = steps.choose(steps.queries[0])
    fresh = graph_ms([lambda: bring_rows(steps.rows[False], chosen)])
    pages = bring_rows(steps.rows[False], chosen)
    attend = graph_ms([lambda: steps.attend(steps.queries[0], pages)])
    return {
        "repeats_next": round(steps.repeats(8), 3),
        "repeats_16": round(steps.repeats(4, 16), 3),
        "scan_select_ms": round(scan, 4),
        "attend_ms": round(attend, 4),
        "all_rows_ms": round(fresh, 4),
        "all_rows_of_pinned": round(past.budget * past.row_format.page_bytes / fresh * 1e3 / pinned, 3),
    }


def _between(steps: Steps, held: Pages) -> dict[str, Any]:
    """A step between scans by itself, and listing what the hot buffer holds."""
    listed = graph_ms([lambda: held_pages(steps.rows[True])])
    attend = graph_ms([lambda: steps.attend(steps.queries[0], held)])
    return {
        "between_scans_ms": round(attend, 4),
        "list_held_ms": round(listed, 4),
        "held_rows": int(held.count[0]),
    }
