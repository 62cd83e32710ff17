"""A whole decode step with recall: scan, selection, rows from the host through the hot buffer, attention over it all.

Queries drift as a model's do: neighbouring steps share most of their rows, and most of what is new was wanted a few
steps before. How far they drift is set so that the share that repeats is the one measured on real models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
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

    def step(self, q: Tensor) -> Tensor:
        """[1, Hq, D]"""
        past = self.past
        return recall_step(
            q[None], self.dense_k, self.dense_v, self.length, self.kept, self.rows[True], past.layer.stats,
            past.scaling, past.budget, split="rope",
        ).out  # fmt: skip

    def attend(self, q: Tensor, recalled: Pages) -> Tensor:
        """[1, Hq, D]: the last part of a step."""
        past = self.past
        return decode_attention(
            q[None], self.dense_k, self.dense_v, self.length, self.kept, recalled, past.layer.stats, past.scaling,
            split="rope",
        ).out  # fmt: skip

    def error(self, index: int) -> float:
        """Of one step through the hot buffer, against float64 over the same rows."""
        past, q = self.past, self.queries[index]
        found = self.step(q)[0].double()
        chosen = self.choose(q)
        place = torch.empty(past.rows, dtype=torch.int64, device=q.device)
        place[past.ids] = torch.arange(past.rows, device=q.device)
        packed = past.chosen(place[chosen.rows[0, : int(chosen.number)].long()])
        want = float64_attention(q.view(past.dense_k.shape[0], -1, q.shape[1]), past.slices(packed), past.scaling)
        want = want.flatten(0, 1)
        return float(((found - want).norm(dim=-1) / want.norm(dim=-1)).max())


def replay_ms(
    step: Callable[[Tensor], Any] | list[Callable[[Tensor], Any]],
    queries: Tensor,
    warm: int,
    counters: list[Tensor] | None = None,
) -> tuple[float, Tensor | None]:
    """Milliseconds a step of one layer, and by how much `counters` rose: the steps of all queries but the first `warm`
    in one CUDA graph, as a captured model runs its layers one after the other. step: of one layer, or of several, whose
    steps take turns."""
    layers = step if isinstance(step, list) else [step]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for layer in layers:
            layer(queries[0])
    torch.cuda.synchronize()
    graphs = []
    for some in (queries[:warm], queries[warm:]):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for query in some:
                for layer in layers:
                    layer(query)
    before = None
    for timed in (False, True):  # a graph's first replay takes longer
        if len(queries[:warm]):
            graphs[0].replay()
        before = None if counters is None else torch.stack(counters)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graphs[1].replay()
        end.record()
        torch.cuda.synchronize()
        if timed:
            rose = None if counters is None or before is None else (torch.stack(counters) - before).sum(0)
            return float(begin.elapsed_time(end)) / (len(queries) - warm) / len(layers), rose
    raise AssertionError


def run(
    name: str,
    context: int,
    capacities: list[float],
    bits: list[int],
    page_sizes: list[int],
    device: torch.device,
    read: float,
    pinned: float,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """A row for each capacity, width of sketches and number of kept tokens a page. read, pinned: bytes a second of the
    device's and the host's memory. say: is told what cannot be, and why. Raises WrongResult."""
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
        yield _measure(past, what, dense, read, pinned)


def _measure(past: Past, what: str, dense: float, read: float, pinned: float) -> dict[str, Any]:
    """The whole step, and its parts."""
    name, context = past.name, past.context
    steps = Steps(past)
    # What a step leaves in the L2 cache, other layers replace in a model: here, too.
    layers = max(2, min(8, -(-L2_BYTES // (2 * past.device_bytes))))
    every = [steps, *(Steps(past.again(), steps.drift) for _ in range(layers - 1))]
    error = check(f"recall {name} {context} {what}", max(steps.error(i) for i in range(3)), TOLERANCE)
    ms, rose = replay_ms([each.step for each in every], steps.queries, WARM, [each.hot.counters for each in every])
    assert rose is not None
    found, missed = rose[0].tolist()
    missed_bytes = missed / (found + missed) * past.budget * past.row_format.page_bytes
    # Between scans a step attends to all that the hot buffer holds; the first of them lists it.
    held = held_pages(steps.rows[True])
    listed = graph_ms([lambda: held_pages(steps.rows[True])])
    between = graph_ms([lambda: steps.attend(steps.queries[0], held)])
    scan, _ = replay_ms([each.choose for each in every], steps.queries, WARM)
    chosen = steps.choose(steps.queries[0])
    fresh = graph_ms([lambda: bring_rows(steps.rows[False], chosen)])
    pages = bring_rows(steps.rows[False], chosen)
    attend = graph_ms([lambda: steps.attend(steps.queries[0], pages)])
    size = past.codes.nbytes + past.scales.nbytes + 4 * past.rows + past.kept_pages.nbytes
    size += past.budget * past.row_format.page_bytes
    return make_row(
        "recall", name, context, ms, what=what, capacity=round(past.capacity, 2), dense_ms=dense, bytes=size,
        bandwidth_fraction=round(size / ms * 1e3 / read, 4), error=error, rows=past.budget, hot_rows=past.hot_rows,
        hit_rate=round(found / (found + missed), 4), layers=layers, host_bytes=round(missed_bytes),
        repeats_next=round(steps.repeats(8), 3), repeats_16=round(steps.repeats(4, 16), 3),
        between_scans_ms=round(between, 4), list_held_ms=round(listed, 4), held_rows=int(held.count[0]),
        **{f"scan_every_{n}_ms": round((ms + listed + (n - 1) * between) / n, 4) for n in (2, 4)},
        scan_select_ms=round(scan, 4), attend_ms=round(attend, 4), all_rows_ms=round(fresh, 4),
        all_rows_of_pinned=round(past.budget * past.row_format.page_bytes / fresh * 1e3 / pinned, 3),
    )  # fmt: skip
