"""Confidence intervals for the quality figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from hisparse.errors import InputError


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion: (low, high), both in [0, 1].

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927). Unlike the
    normal approximation it stays sensible at accuracies of 0 and 1. Raises InputError for n < 1 or counts outside 0..n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise InputError(f"{successes} successes of {n}: give at least one trial and a count between 0 and it")
    if not 0 < confidence < 1:
        raise InputError(f"confidence {confidence}: give a number between 0 and 1, such as 0.95")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At the ends the exact value is 0 or 1; rounding may miss it by one unit in the last place.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def paired_interval(
    differences: Sequence[Sequence[float]], confidence: float = 0.95, draws: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `differences`, resampling whole groups.

    `differences[c]` holds, for context c, one value a question: ours minus dense, in {-1, 0, 1}. Questions on one
    context share its prefill and are not independent, so contexts are drawn, not questions (B. Efron, R. Tibshirani,
    An Introduction to the Bootstrap, 1993, chapter 8). Deterministic by `seed`. Raises InputError without any value.
    """
    sums = np.array([math.fsum(group) for group in differences if len(group)], dtype=np.float64)
    sizes = np.array([len(group) for group in differences if len(group)], dtype=np.float64)
    if not len(sums):
        raise InputError("no paired answers to compare; ask at least one question")
    picks = np.random.default_rng(seed).integers(0, len(sums), size=(draws, len(sums)))
    means = sums[picks].sum(1) / sizes[picks].sum(1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
