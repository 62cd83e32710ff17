"""Times of a cache beside the dense one: paired runs in one process, and only where its answers are right."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import HiSparseError, InputError
from hisparse.evaluate.caches import CacheFactory, feed, synchronize
from hisparse.evaluate.fidelity import divergence

_WARM_UP = 64  # tokens prefilled once before the clock starts: allocators, thread pools, lazy imports


class SpeedRefusedError(HiSparseError):
    """The cache's answers are too far from the dense ones for its speed to mean anything."""


@dataclass(frozen=True)
class Sample:
    """One run: seconds of the whole prefill, milliseconds of each decoded token."""

    prefill_seconds: float
    decode_ms: tuple[float, ...]

    @property
    def decode_median(self) -> float:
        return statistics.median(self.decode_ms)


def run_once(
    model: Any, factory: CacheFactory, ids: Tensor, decoded: int, chunk: int | None = None, keep_logits: bool = False
) -> tuple[Sample, list[Tensor], dict[str, Any]]:
    """Prefill all but the last `decoded` of `ids` int64 [1, N], then feed those one by one, each timed on its own.

    Returns the times, the logits of each decoded token ([V] each, empty unless `keep_logits`) and the cache's report.
    The tokens are given, not sampled, so that every kind of cache does the same work.
    """
    past = ids.shape[1] - decoded
    gc.collect()
    cache = factory.new(model)
    synchronize(ids.device)
    start = time.perf_counter()
    feed(model, cache, ids[:, :past], chunk=chunk)
    synchronize(ids.device)
    prefill = time.perf_counter() - start
    times, logits = [], []
    for index in range(past, ids.shape[1]):
        start = time.perf_counter()
        row = feed(model, cache, ids[:, index : index + 1])[-1]
        synchronize(ids.device)
        times.append(1e3 * (time.perf_counter() - start))
        if keep_logits:
            logits.append(row)
    return Sample(prefill, tuple(times)), logits, factory.report(cache)


def compare_speed(
    model: Any,
    window: Tensor,
    dense: CacheFactory,
    ours: CacheFactory,
    *,
    decoded: int = 48,
    rounds: int = 3,
    chunk: int | None = None,
    max_kl: float = 0.05,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time both caches `rounds` times in alternating order on `window`, int64 [1, N + 1].

    The first round's logits are compared before anything is reported: a mean KL(dense || ours) above `max_kl` raises
    SpeedRefusedError. Medians are over rounds (prefill) and over all decoded tokens; a ratio is ours / dense within one
    round, and the median, least and greatest of the rounds are given. `progress` is called after each run.
    """
    if rounds < 1 or decoded < 1 or window.shape[1] < decoded + 2:
        raise InputError(
            f"{rounds} rounds of {decoded} decoded tokens in a window of {window.shape[1] - 1}: give at least one "
            "of each and a window that leaves something to prefill"
        )
    ids = window[:, :-1].to(model.device)
    pair = (dense, ours)
    warm = min(_WARM_UP, ids.shape[1] - 1)
    for factory in pair:
        run_once(model, factory, ids[:, : warm + 1], 1, chunk)
    samples: list[list[Sample]] = [[], []]
    reports: list[dict[str, Any]] = [{}, {}]
    checked: dict[str, Any] = {}
    for turn in range(rounds):
        logits: list[list[Tensor]] = [[], []]
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            sample, logits[which], reports[which] = run_once(model, pair[which], ids, decoded, chunk, turn == 0)
            samples[which].append(sample)
            progress()
        if turn == 0:
            checked = divergence(torch.stack(logits[0]), torch.stack(logits[1]), window[0, -decoded:]).to_json()
            if checked["mean_kl"] > max_kl:
                raise SpeedRefusedError(
                    f"mean KL of {ours.name} against {dense.name} is {checked['mean_kl']:.4g} over {decoded} tokens, "
                    f"above {max_kl}: a cache that answers differently gets no speed; find out why, or raise --max-kl"
                )
    return {
        "tokens": ids.shape[1],
        "decoded": decoded,
        "rounds": rounds,
        "order": "alternating, dense first in round 1",
        "max_kl_allowed": max_kl,
        "check": checked,
        dense.name: _times(samples[0], reports[0]),
        ours.name: _times(samples[1], reports[1]),
        "ratio": {
            "prefill": _ratios([b.prefill_seconds / a.prefill_seconds for a, b in zip(*samples, strict=True)]),
            "decode": _ratios([b.decode_median / a.decode_median for a, b in zip(*samples, strict=True)]),
        },
    }


def _times(samples: list[Sample], report: dict[str, Any]) -> dict[str, Any]:
    steps = [value for sample in samples for value in sample.decode_ms]
    return {
        "prefill_seconds": statistics.median(sample.prefill_seconds for sample in samples),
        "prefill_seconds_rounds": [sample.prefill_seconds for sample in samples],
        "decode_ms": statistics.median(steps),
        "decode_ms_rounds": [sample.decode_median for sample in samples],
        "decode_ms_p90": statistics.quantiles(steps, n=10)[-1] if len(steps) > 1 else steps[0],
        "kv": report,
    }


def _ratios(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
