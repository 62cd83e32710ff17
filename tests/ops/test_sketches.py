"""Sketches, against a reader written from the description of their layout, one coordinate at a time, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops.sketch import STEP, build_sketch, coordinates, score_sketch, sketch_bytes
from hisparse.vtq import ChannelStats, estimate_stats

DIMS = [16, 64, 80, 96, 128, 256]


def decode(codes: np.ndarray, scales: np.ndarray, dim: int, bits: int) -> np.ndarray:
    """Coordinates float64 [n, R, H, D] of codes uint8 [n, H, R, D * bits / 8] and scales uint8 [n, H, R]."""
    n, heads, rows = scales.shape
    quarter = dim * bits // 16  # pairs of bytes of a head
    out = np.zeros((n, rows, heads, dim))
    for i, r, h in np.ndindex(n, rows, heads):
        rms = 2.0 ** ((float(scales[i, h, r]) - 128) / 16)
        for b in range(quarter):
            high, low = int(codes[i, h, r, 2 * b]), int(codes[i, h, r, 2 * b + 1])
            out[i, r, h, b] = (high % 16 - 7.5) * STEP[4] * rms
            out[i, r, h, quarter + b] = (high // 16 - 7.5) * STEP[4] * rms
            for s in range(4):
                out[i, r, h, 2 * quarter + s * quarter + b] = (low // 4**s % 4 - 1.5) * STEP[2] * rms
    return out


def coordinates_of(keys: Tensor, stats: ChannelStats) -> np.ndarray:
    centred = (keys.double() - stats.k_mean.double()).numpy()
    return np.einsum("nrhd,hdc->nrhc", centred, stats.sketch_basis.double().numpy())


def rounding(keys: Tensor, stats: ChannelStats) -> np.ndarray:
    """How far float32 may be from `coordinates_of`: a sum's rounding errors grow like the root of its number of terms
    (Higham and Mary, 2019), times what the terms amount to without their signs."""
    centred = np.abs((keys.double() - stats.k_mean.double()).numpy())
    gross = np.einsum("nrhd,hdc->nrhc", centred, np.abs(stats.sketch_basis.double().numpy()))
    return np.sqrt(keys.shape[-1]) * 2.0**-24 * gross


def estimate(queries: Tensor, decoded: np.ndarray, stats: ChannelStats, scaling: float) -> np.ndarray:
    """scaling * (q . mean + (q @ query_basis) . coordinates), float64 [Hq, T, n * R]."""
    q_heads = queries.shape[0]
    heads = stats.heads
    q = queries.double().numpy()
    mean, basis = stats.k_mean.double().numpy(), np.linalg.inv(stats.sketch_basis.double().numpy()).transpose(0, 2, 1)
    flat = decoded.reshape(-1, *decoded.shape[2:])
    out = np.empty((q_heads, q.shape[1], len(flat)))
    for g in range(q_heads):
        h = g // (q_heads // heads)
        out[g] = scaling * ((q[g] @ mean[h])[:, None] + q[g] @ basis[h] @ flat[:, h].T)
    return out


def text_like(
    n: int, rows: int, heads: int, q_heads: int, dim: int, seed: int, rank: int = 5, decay: float = 1.0
) -> tuple[Tensor, Tensor, ChannelStats]:
    """Keys of low-rank structure with an offset, queries that look along the same directions, and their statistics."""
    make = torch.Generator().manual_seed(seed)
    directions = torch.randn(heads, rank, dim, generator=make)
    strength = torch.logspace(decay / 2, -decay / 2, rank)
    keys = torch.einsum("nrhk,hkd->nrhd", torch.randn(n, rows, heads, rank, generator=make) * strength, directions)
    keys = keys + 0.2 * torch.randn(n, rows, heads, dim, generator=make) + 3 * torch.randn(heads, dim, generator=make)
    picked = torch.randn(heads, q_heads // heads, 40, rank, generator=make) * strength
    queries = torch.einsum("hgtk,hkd->hgtd", picked, directions).flatten(0, 1)
    queries = queries + 0.2 * torch.randn(queries.shape, generator=make)
    flat = keys.flatten(0, 1)
    return keys, queries, estimate_stats(flat, flat, torch.arange(dim), queries.transpose(0, 1))


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dim", DIMS)
def test_codes_read_as_described_are_the_nearest_levels(dim: int, bits: int) -> None:
    keys, _, stats = text_like(5, 3, 2, 2, dim, dim + bits)
    codes, scales = build_sketch(keys, stats, bits)
    assert codes.shape == (5, 2, 3, dim * bits // 8)
    assert scales.shape == (5, 2, 3)
    assert codes.dtype == scales.dtype == torch.uint8
    assert sketch_bytes(dim, bits) == codes.shape[-1] + 1
    want = coordinates_of(keys, stats)
    four, two = coordinates(dim, bits)
    used = want[..., : four + two]
    rms = np.sqrt((used**2).mean(-1))
    stored = 2.0 ** ((scales.transpose(1, 2).numpy().astype(float) - 128) / 16)
    np.testing.assert_allclose(np.log2(stored / rms), 0, atol=1 / 32 + 1e-4)
    found = decode(codes.numpy(), scales.numpy(), dim, bits)
    error = rounding(keys, stats)
    for start, end, levels, step in ((0, four, 16, STEP[4]), (four, four + two, 4, STEP[2])):
        x = used[..., start:end] / stored[..., None] / step
        nearest = np.clip(np.floor(x + levels / 2), 0, levels - 1) - (levels - 1) / 2
        got = found[..., start:end] / stored[..., None] / step
        reach = error[..., start:end] / stored[..., None] / step + 2.0**-22 * np.abs(x)
        edge = np.abs(x - np.round(x)) < reach  # float32 may fall to either side of a boundary
        assert (edge & (np.abs(x) > 0.5)).mean() < 0.02  # 15 keys leave other coordinates at 0, which is a boundary
        np.testing.assert_allclose(np.where(edge, 0, got - nearest), 0, atol=1e-6)
        assert (np.abs(got - nearest) < 1 + 1e-6).all()
    assert (found[..., four + two :] == 0).all()


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("heads", "q_heads", "chunk"), [(1, 1, 1), (2, 6, 1), (3, 3, 5), (2, 16, 2)], ids=str)
def test_scores_are_those_of_the_decoded_keys(dim: int, bits: int, heads: int, q_heads: int, chunk: int) -> None:
    keys, queries, stats = text_like(7, 3, heads, q_heads, dim, dim)
    codes, scales = build_sketch(keys, stats, bits)
    found = score_sketch(queries[:, :chunk], codes, scales, stats, 0.37)
    assert found.shape == (q_heads, chunk, 21)
    assert found.dtype == torch.float32
    want = estimate(queries[:, :chunk], decode(codes.numpy(), scales.numpy(), dim, bits), stats, 0.37)
    np.testing.assert_allclose(found.double().numpy(), want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 5),
    rows=st.integers(1, 7),
    heads=st.integers(1, 3),
    group=st.integers(1, 8),
    sixteenths=st.integers(1, 5),
    bits=st.sampled_from([1, 2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_any_bytes_are_scored_as_described(
    n: int, rows: int, heads: int, group: int, sixteenths: int, bits: int, dtype: torch.dtype, seed: int
) -> None:
    dim, make = 16 * sixteenths, torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, heads, rows, dim * bits // 8), dtype=torch.uint8, generator=make)
    scales = torch.randint(90, 160, (n, heads, rows), dtype=torch.uint8, generator=make)
    one = torch.ones(heads, dim)
    stats = ChannelStats(
        torch.randn(heads, dim, generator=make), torch.rand(heads, dim, generator=make) + 0.5, one, one,
        torch.arange(dim),
    )  # fmt: skip
    queries = torch.randn(heads * group, 2, dim, generator=make).to(dtype)
    found = score_sketch(queries, codes, scales, stats, dim**-0.5)
    want = estimate(queries.float(), decode(codes.numpy(), scales.numpy(), dim, bits), stats, dim**-0.5)
    np.testing.assert_allclose(found.double().numpy(), want, rtol=1e-3, atol=2e-4 * max(1.0, np.abs(want).max()))


# Squared error of Max's uniform quantisers for a standard normal, by number of bits.
LOSS = {4: 0.01154, 2: 0.1188, 0: 1.0}


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_scores_are_as_exact_as_theory_says_and_more_bits_are_more_exact(dim: int, decay: float) -> None:
    keys, queries, stats = text_like(150, 4, 2, 4, dim, dim, rank=dim // 3, decay=decay)
    exact = torch.einsum("hgtd,nrhd->hgtnr", queries.view(2, 2, 40, dim), keys).flatten(3).flatten(0, 1)
    spread = exact - exact.mean(-1, keepdim=True)
    turned = np.linalg.inv(stats.sketch_basis.double().numpy()) @ queries.view(2, 80, dim).double().numpy().swapaxes(
        1, 2
    )
    weights = (turned**2).mean(-1)  # [H, D]: how much each coordinate's error counts
    errors = {}
    for bits in (1, 2):
        codes, scales = build_sketch(keys, stats, bits)
        found = score_sketch(queries, codes, scales, stats, 1.0)
        errors[bits] = float(((found - exact).square().mean() / spread.square().mean()).sqrt())
        assert np.corrcoef(found.flatten(), exact.flatten())[0, 1] > 0.96
        best = exact.argmax(-1, keepdim=True)
        rank = (found > found.gather(-1, best)).sum(-1).float()
        assert float(rank.mean()) < 6  # of 600
        four, two = coordinates(dim, bits)
        loss = np.repeat([LOSS[4], LOSS[2], LOSS[0]], [four, two, dim - four - two])
        theory = np.sqrt((weights @ loss).sum() / weights.sum())
        assert errors[bits] == pytest.approx(theory, rel=0.25)
    assert errors[2] < 0.8 * errors[1] if decay == 0 else errors[2] < errors[1]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    keys, queries, stats = text_like(9, 4, 2, 4, 64, 0)
    codes, scales = build_sketch(keys, stats, 2)
    some, their = build_sketch(keys[[7, 2]], stats, 2)
    assert torch.equal(some, codes[[7, 2]])
    assert torch.equal(their, scales[[7, 2]])
    whole = score_sketch(queries, codes, scales, stats, 1.0)
    torch.testing.assert_close(score_sketch(queries, some, their, stats, 1.0)[..., :4], whole[..., 28:32])


def test_strided_input_and_no_rows() -> None:
    keys, queries, stats = text_like(6, 4, 2, 4, 64, 1)
    codes, scales = build_sketch(keys, stats, 1)
    strided = keys.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    assert torch.equal(build_sketch(strided, stats, 1)[0], codes)
    turned = queries.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(
        score_sketch(turned, codes, scales, stats, 1.0), score_sketch(queries, codes, scales, stats, 1.0)
    )
    none = build_sketch(keys[:0], stats, 1)
    assert score_sketch(queries, *none, stats, 1.0).shape == (4, 40, 0)


@pytest.mark.parametrize("size", [0.0, 1e-6, 1e6])
def test_extreme_keys_keep_finite_scores(size: float) -> None:
    stats = ChannelStats.identity(1, 64)
    keys = torch.randn(3, 4, 1, 64, generator=torch.Generator().manual_seed(0)) * size
    codes, scales = build_sketch(keys, stats, 2)
    found = score_sketch(torch.randn(2, 1, 64), codes, scales, stats, 1.0)
    assert bool(found.isfinite().all())
    if size == 0:
        assert float(found.abs().max()) < 1  # smallest scale, not noise


@pytest.mark.parametrize("dim", [8, 24, 40])
def test_a_head_that_does_not_divide_into_bytes_is_refused(dim: int) -> None:
    with pytest.raises(FormatError, match=rf"head_dim {dim} .* 1 bit.*evict"):
        build_sketch(torch.randn(2, 4, 1, dim), ChannelStats.identity(1, dim), 1)
