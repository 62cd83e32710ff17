"""Decode attention, independently: pages read value by value, float64, one query at a time. And inputs to compare
on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.ops.decode import DecodeResult, Pages
from hisparse.ops.pack import pack_pages
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

sys.path.insert(0, str(Path(__file__).parents[1] / "vtq"))
import vtq_oracle

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
"""Largest relative error of the output, in the Euclidean norm over a head. float64 is limited by the float32
statistics."""


@dataclass
class Case:
    q: Tensor
    dense_k: Tensor
    dense_v: Tensor
    dense_len: Tensor
    kept: Pages | None
    recalled: Pages | None
    stats: ChannelStats
    scaling: float
    extra_logit: Tensor | None
    extra_value: Tensor | None

    def arguments(self) -> tuple[Any, ...]:
        return (self.q, self.dense_k, self.dense_v, self.dense_len, self.kept, self.recalled, self.stats, self.scaling)

    def extras(self) -> dict[str, Any]:
        return {"extra_logit": self.extra_logit, "extra_value": self.extra_value}


def make_stats(heads: int, dim: int, rng: torch.Generator) -> ChannelStats:
    k_mean, v_mean = (torch.randn(heads, dim, generator=rng) for _ in range(2))
    k_mean[:, ::7] *= 8  # channels with constant offsets, as some models have
    k_scale, v_scale = (torch.rand(heads, dim, generator=rng) + 0.3 for _ in range(2))
    return ChannelStats(k_mean, k_scale, v_mean, v_scale, torch.randperm(dim, generator=rng))


def make_pages(
    fmt: PageFormat, counts: list[int], stats: ChannelStats, split: str, dtype: torch.dtype, rng: torch.Generator
) -> Pages:
    """Pages in a shuffled pool, with others of NaN between them; the tables hold nonsense beyond the counts."""
    total, width = sum(counts), max([*counts, 1]) + 1
    shape = (total, fmt.tokens, fmt.heads, fmt.head_dim)
    k = torch.randn(shape, generator=rng) * stats.k_scale + stats.k_mean
    v = (
        torch.randn(shape, generator=rng) * stats.v_scale * (1 + torch.arange(total).view(-1, 1, 1, 1) % 3)
        + stats.v_mean
    )
    pool = torch.full((2 * total + 1, fmt.page_bytes), 0xFF, dtype=torch.uint8)
    ids = torch.randperm(2 * total + 1, generator=rng)[:total].int()
    if total:
        half = torch.float32 if dtype == torch.float64 else dtype
        packed = [
            pack_pages(k[i : i + 1].to(half), v[i : i + 1].to(half), stats, fmt, split if split != "both" else rule)
            for i, rule in ((i, ("rope", "never")[i % 2]) for i in range(total))
        ]
        pool[ids.long()] = torch.cat(packed)
    table = torch.full((len(counts), width), 2**30, dtype=torch.int32)
    start = 0
    for row, count in enumerate(counts):
        table[row, :count] = ids[start : start + count]
        start += count
    return Pages(pool, table, torch.tensor(counts, dtype=torch.int32), fmt)


def make_case(
    dtype: torch.dtype = torch.float32,
    heads: int = 2,
    queries: int = 4,
    dim: int = 64,
    tokens: int = 8,
    bits: tuple[int, int] = (5, 5),
    group: int = 64,
    split: str = "both",
    counts: tuple[int, ...] = (5, 0, 3),
    rows: tuple[int, ...] | None = (2, 0, 7),
    lengths: tuple[int, ...] = (37, 0, 6),
    extra: int = 0,
    raw: bool = False,
    seed: int = 0,
) -> Case:
    rng = torch.Generator().manual_seed(seed)
    batch = len(counts)
    stats = make_stats(heads, dim, rng)
    stored = torch.float32 if dtype == torch.float64 else dtype

    def fmt(size: int) -> PageFormat:
        if raw:
            return PageFormat.raw(stored, heads, dim, size)
        return PageFormat(size, heads, dim, *bits, group)

    q = (torch.randn(batch, heads * queries, dim, generator=rng) * torch.rand(batch, 1, 1, generator=rng) * 3).to(dtype)
    dense = torch.randn(2, batch, heads, max(lengths) + 1, dim, generator=rng).to(dtype)
    dense[0] += stats.k_mean[None, :, None].to(dtype)
    for row, length in enumerate(lengths):
        dense[:, row, :, length:] = float("nan")
    logit = value = None
    if extra:
        logit = torch.randn(batch, heads * queries, extra, generator=rng)
        logit[:, :, -1] = float("-inf")
        value = torch.randn(batch, heads, extra, dim, generator=rng).to(dtype)
    return Case(
        q,
        dense[0],
        dense[1],
        torch.tensor(lengths, dtype=torch.int32),
        make_pages(fmt(tokens), list(counts), stats, split, dtype, rng),
        None if rows is None else make_pages(fmt(4), list(rows), stats, split, dtype, rng),
        stats,
        dim**-0.5,
        logit,
        value,
    )


def _page(pages: Pages, page: int, stats: ChannelStats) -> tuple[np.ndarray, np.ndarray]:
    """k, v float64 [P, H, D] of one page."""
    fmt = pages.fmt
    raw = pages.pool[page]
    if fmt.raw_dtype is not None:
        size = fmt.heads * fmt.tokens * fmt.head_dim * fmt.raw_dtype.itemsize
        parts = (raw[at : at + size].view(fmt.raw_dtype).double() for at in (0, fmt.raw_v_offset))
        k, v = (x.view(fmt.heads, fmt.tokens, fmt.head_dim).transpose(0, 1).numpy() for x in parts)
        return k, v
    shape = (fmt.tokens, fmt.heads, fmt.head_dim, fmt.k_bits, fmt.v_bits, fmt.group)
    k, v = (x.values for x in vtq_oracle.decode(bytes(raw.tolist()), *shape))
    keys = np.empty_like(k)
    keys[:, :, stats.order.numpy()] = k  # stored place i holds channel order[i]
    s = {n: getattr(stats, n).double().numpy() for n in ("k_mean", "k_scale", "v_mean", "v_scale")}
    return keys * s["k_scale"] + s["k_mean"], v * s["v_scale"] + s["v_mean"]


def expected(case: Case) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """out [B, Hq, D], lse [B, Hq], and the page masses [B, Hq, max_pages] of kept and recalled (NaN where
    undefined)."""
    batch, q_heads, dim = case.q.shape
    heads = case.dense_k.shape[1]
    out, lse = np.zeros((batch, q_heads, dim)), np.full((batch, q_heads), -np.inf)
    parts = [p for p in (case.kept, case.recalled) if p is not None]
    masses = [np.full((batch, q_heads, p.table.shape[1]), np.nan) for p in parts]
    for b in range(batch):
        stored = [[_page(p, int(i), case.stats) for i in p.table[b, : int(p.count[b])]] for p in parts]
        for h in range(q_heads):
            kv, n = h // (q_heads // heads), int(case.dense_len[b])
            q = case.q[b, h].double().numpy() * case.scaling
            scores = [case.dense_k[b, kv, :n].double().numpy() @ q]
            values = [case.dense_v[b, kv, :n].double().numpy()]
            for part, pages in enumerate(stored):
                for i, (k, v) in enumerate(pages):
                    scores.append(k[:, kv] @ q)
                    values.append(v[:, kv])
                    masses[part][b, h, i] = np.logaddexp.reduce(scores[-1])
            if case.extra_logit is not None and case.extra_value is not None:
                scores.append(case.extra_logit[b, h].double().numpy())
                values.append(case.extra_value[b, kv].double().numpy())
            s, v = np.concatenate(scores), np.concatenate(values)
            if len(s):
                lse[b, h] = np.logaddexp.reduce(s)
                out[b, h] = np.exp(s - lse[b, h]) @ v
    return out, lse, masses


def check(case: Case, result: DecodeResult, page_mass: bool = False) -> None:
    out, lse, masses = expected(case)
    tolerance = TOLERANCE[case.q.dtype]
    got = result.out.double().cpu().numpy()
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - out, axis=-1) / np.maximum(np.linalg.norm(out, axis=-1), 1e-6)
    assert error.max() <= tolerance, f"relative error {error.max():.2e} > {tolerance:.0e}"
    absolute = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(case.q.dtype, 1e-4)
    np.testing.assert_allclose(result.lse.cpu().numpy(), lse, atol=absolute, rtol=1e-5)
    if page_mass:
        for mass, want in zip([m for m in result[2:] if m is not None], masses, strict=True):
            known = ~np.isnan(want)
            np.testing.assert_allclose(mass.cpu().numpy()[known], want[known], atol=absolute, rtol=1e-4)
