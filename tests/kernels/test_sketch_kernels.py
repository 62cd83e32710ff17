"""The Triton twins of sketching and of row selection, in the interpreter without a GPU, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scan_tools import decode_keys, make_stats, oracle_scores, oracle_worth

from hisparse.ops.sketch import reference as plain

twin = pytest.importorskip("hisparse.ops.sketch.triton")
select = pytest.importorskip("hisparse.ops.select.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = torch.empty

    def empty(*size: int, **options: object) -> torch.Tensor:
        x = fresh(*size, **options)  # type: ignore[call-overload]
        return x.fill_(float("nan") if x.is_floating_point() else 201)

    monkeypatch.setattr(torch, "empty", empty)


SHAPES = [  # rows, row_size, heads, head_dim, bits
    pytest.param(5, 4, 2, 128, 2, id="5x4-2x128-2bit"),
    pytest.param(3, 8, 1, 128, 1, id="3x8-1x128-1bit"),
    pytest.param(63, 1, 3, 64, 2, id="63x1-3x64-2bit"),
    pytest.param(1, 4, 2, 96, 1, id="1x4-2x96-1bit"),
    pytest.param(2, 5, 1, 256, 2, id="2x5-1x256-2bit"),
    pytest.param(3, 4, 2, 80, 1, id="3x4-2x80-1bit"),
]


def make_keys(rows: int, row_size: int, heads: int, dim: int, strided: bool = False) -> torch.Tensor:
    make = torch.Generator().manual_seed(rows)
    keys = torch.randn(heads, rows, row_size, dim, generator=make) * 2 + 3
    return keys.to(DEVICE).permute(1, 2, 0, 3) if strided else keys.to(DEVICE).permute(1, 2, 0, 3).contiguous()


@pytest.mark.parametrize(("rows", "row_size", "heads", "dim", "bits"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sketches_are_the_nearest_codes(rows, row_size, heads, dim, bits, dtype) -> None:
    stats = make_stats(heads, dim).to(DEVICE)
    keys = make_keys(rows, row_size, heads, dim, strided=dtype == torch.bfloat16).to(dtype)
    codes, scales = twin.build_sketch(keys, stats, bits)
    other_codes, other_scales = plain.build_sketch(keys, stats, bits)
    assert codes.shape == other_codes.shape
    assert scales.shape == other_scales.shape
    # Rounding differs between the twins only where a value lies between two codes as near as float32 can tell.
    assert (scales.int() - other_scales.int()).abs().max() <= 1
    same = scales == other_scales
    assert same.float().mean() > 0.95
    assert (codes[same] == other_codes[same]).float().mean() > 0.995
    count = dim * bits * 3 // 8
    basis = stats.sketch_basis.double()
    y = torch.einsum("nrhd,hdc->nrhc", keys.double() - stats.k_mean, basis).flatten(0, 1)[..., :count].cpu().numpy()
    decoded = decode_keys(codes, scales, bits)[..., :count]
    size = 2 ** ((scales.transpose(1, 2).flatten(0, 1).double().cpu().numpy()[..., None] - 128) / 16)
    step = np.where(np.arange(count) < dim * bits // 8, 0.3352, 0.9957) * size
    top = np.where(np.arange(count) < dim * bits // 8, 7.5, 1.5) * step
    assert (np.abs(decoded - np.clip(y, -top, top)) <= step * 0.5001).all()


@pytest.mark.parametrize(("rows", "row_size", "heads", "dim", "bits"), SHAPES)
@pytest.mark.parametrize(("queries", "chunk"), [(1, 1), (3, 5), (16, 3)])
def test_scores(rows, row_size, heads, dim, bits, queries, chunk) -> None:
    stats = make_stats(heads, dim).to(DEVICE)
    codes, scales = plain.build_sketch(make_keys(rows, row_size, heads, dim), stats, bits)
    make = torch.Generator().manual_seed(queries)
    q = torch.randn(chunk, heads * queries, dim, generator=make).to(DEVICE).transpose(0, 1)
    scaling = dim**-0.5
    scores = twin.score_sketch(q, codes, scales, stats, scaling).cpu().double().numpy()
    expected = np.stack([oracle_scores(q[:, t], codes, scales, stats, scaling, bits) for t in range(chunk)], 1)
    assert scores.shape == expected.shape
    assert np.linalg.norm(scores - expected) <= 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("heads", "queries", "rows", "row_size", "count"),
    [(3, 1, 123, 4, 9), (2, 5, 63, 8, 63), (1, 1, 1, 4, 5), (4, 2, 5, 3, 2), (1, 1, 9, 2, 0)],
)
def test_rows_of_most_worth(heads: int, queries: int, rows: int, row_size: int, count: int) -> None:
    make = torch.Generator().manual_seed(rows)
    scores = (torch.randn(heads, queries, rows * row_size, generator=make) * 4 + 50).to(DEVICE)
    chosen = select.select_rows(scores, row_size, count).tolist()
    each = [oracle_worth(scores[:, t].cpu().double().numpy(), row_size) for t in range(queries)]
    worth = np.max(each, 0)
    assert len(chosen) == len(set(chosen)) == min(count, rows)
    assert set(chosen) == set(np.argsort(-worth)[: min(count, rows)].tolist())
    if count:
        assert np.allclose(select.row_worth(scores, row_size).cpu().numpy(), worth, rtol=1e-5)


@pytest.mark.parametrize(("rows", "row_size", "heads", "dim", "bits"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_and_rows_lie_anywhere(rows, row_size, heads, dim, bits, dtype) -> None:
    stats = make_stats(heads, dim).to(DEVICE)
    make = torch.Generator().manual_seed(rows)
    both = (torch.randn(97, 2, heads, dim, generator=make) * 2 + 3).to(dtype).to(DEVICE)
    keys = both[:, 0]  # as a ring has them
    tokens = torch.randint(97, (rows, row_size), generator=make).to(DEVICE)
    places = torch.randperm(80, generator=make)[:rows].to(DEVICE)
    size = heads * row_size * dim * bits // 8
    lines = torch.full((80, size + heads * row_size + 64), 201, dtype=torch.uint8, device=DEVICE)
    lines = lines[:, : lines.shape[1] // 2 * 2] if lines.shape[1] % 2 else lines
    codes, scales = lines[:, :size], lines[:, size : size + heads * row_size]
    want, width = torch.full_like(lines, 201), size + heads * row_size
    other = twin.build_sketch(keys[tokens], stats, bits)
    want[places, :size], want[places, size:width] = other[0].flatten(1), other[1].flatten(1)
    twin.sketch_tokens(keys, tokens, stats, bits, codes, scales, places)
    assert torch.equal(lines, want)
