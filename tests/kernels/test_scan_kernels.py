"""The batched scan and the selection, against float64: the Triton twin, in the interpreter without a GPU, and on a GPU
that can run it the CUDA C++ twin."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from scan_tools import make_stats, oracle_scores, oracle_worth

from hisparse.errors import FormatError
from hisparse.ops._cuda import can_run
from hisparse.ops.scan import Chosen, scan_rows, select_top
from hisparse.ops.scan import cuda as compiled
from hisparse.ops.scan import reference as plain

triton_twin = pytest.importorskip("hisparse.ops.scan.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu" or not can_run(None), reason="needs a GPU of compute capability 9.0")


@pytest.fixture(params=["triton", pytest.param("cuda", marks=needs_gpu)])
def twin(request: pytest.FixtureRequest) -> ModuleType:
    return triton_twin if request.param == "triton" else compiled


def small(twin: ModuleType):
    """Many programs for few rows."""
    if twin is compiled:
        return compiled.Tuning(warps=2, stages=2)
    return triton_twin.Tuning(rows=16, programs=2, sum_rows=64, take_rows=64)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, or for integers a number out of all ranges: what a kernel leaves unwritten shows."""
    fresh = torch.empty

    def empty(*size: int, **options: object) -> torch.Tensor:
        x = fresh(*size, **options)  # type: ignore[call-overload]
        return x.fill_(float("nan") if x.is_floating_point() else 2**30 if x.dtype == torch.int32 else 0)

    monkeypatch.setattr(torch, "empty", empty)


def make_case(
    heads: int, dim: int, queries: int, bits: int, row_size: int, counts: list[int], width: int, seed: int = 0
):
    make = torch.Generator().manual_seed(seed)
    pages = max(sum(counts), 1) + 3
    codes = torch.randint(0, 256, (pages, row_size * heads * dim * bits // 8), generator=make).to(torch.uint8)
    scales = torch.randint(110, 140, (pages, row_size * heads), generator=make).to(torch.uint8)
    order = torch.randperm(pages, generator=make).to(torch.int32)
    table = torch.full((len(counts), width), 2**30, dtype=torch.int32)  # beyond the count: not to be read
    for i, used in enumerate(counts):
        table[i, :used] = order[sum(counts[:i]) : sum(counts[:i]) + used]
    q = torch.randn(len(counts), heads * queries, dim, generator=make)
    stats = make_stats(heads, dim, seed)
    on = [x.to(DEVICE) for x in (q, codes, scales, table, torch.tensor(counts, dtype=torch.int32))]
    return (*on, stats.to(DEVICE))


def expected_worth(q, codes, scales, table, count, stats, scaling, bits):
    row_size = scales.shape[1] // stats.heads
    worth = np.full(table.shape, -np.inf)
    for i, used in enumerate(count.tolist()):
        if used:
            ids = table[i, :used].long()
            shape = used, stats.heads, row_size
            parts = codes[ids].view(*shape, -1), scales[ids].view(*shape)
            worth[i, :used] = oracle_worth(oracle_scores(q[i], *parts, stats, scaling, bits), row_size)
    return worth


CASES = [  # heads, head_dim, queries, bits, row_size, counts, width
    pytest.param(2, 128, 8, 2, 4, [5, 63], 70, id="2x128-8q-2bit-rows4"),
    pytest.param(2, 128, 4, 1, 8, [1, 23], 23, id="2x128-4q-1bit-rows8"),
    pytest.param(4, 64, 1, 2, 4, [17], 20, id="4x64-1q-2bit-rows4"),
    pytest.param(3, 64, 3, 1, 4, [0, 5, 37], 40, id="3x64-3q-1bit-an-empty-sequence"),
    pytest.param(3, 64, 3, 2, 4, [0, 5, 37], 40, id="3x64-3q-2bit-two-heads-an-operand"),
    pytest.param(1, 256, 16, 2, 2, [33], 33, id="1x256-16q-2bit-rows2"),
    pytest.param(2, 96, 7, 2, 4, [123], 123, id="2x96-7q-2bit-rows4"),
    pytest.param(1, 96, 2, 1, 1, [5], 5, id="1x96-2q-1bit-rows1"),
    pytest.param(8, 64, 1, 2, 4, [7], 9, id="8x64-1q-2bit-four-heads-an-operand"),
    pytest.param(3, 80, 2, 1, 4, [5], 9, id="3x80-2q-1bit-five-words-a-head"),
]


@pytest.mark.parametrize(("heads", "dim", "queries", "bits", "row_size", "counts", "width"), CASES)
def test_worth_agrees_with_float64(heads, dim, queries, bits, row_size, counts, width, twin) -> None:
    case = make_case(heads, dim, queries, bits, row_size, counts, width)
    scaling = 0.3 * dim**-0.5
    worth = twin.scan_rows(*case, scaling, bits, small(twin)).cpu().double().numpy()
    expected = expected_worth(*case, scaling, bits)
    assert np.array_equal(np.isneginf(worth), np.isneginf(expected))
    used = np.isfinite(expected)
    # float16 weights change a score by some 1e-3, bfloat16 rounds a head's value to 2**-9
    assert np.abs(worth[used] / expected[used] - 1).max() < 6e-3


@pytest.mark.parametrize("temperature", [0.0, 0.01, 4.0])
def test_worth_of_flat_and_of_peaked_attention(temperature: float, twin: ModuleType) -> None:
    case = make_case(2, 64, 2, 2, 4, [50], 50)
    scaling = temperature * 64**-0.5
    worth = twin.scan_rows(*case, scaling, 2, small(twin)).cpu().double().numpy()
    expected = expected_worth(*case, scaling, 2)
    assert np.abs(worth - expected).max() < 1e-2 * expected.max()


def test_a_row_beyond_the_range_is_still_the_best(twin: ModuleType) -> None:
    """Scores far above those that attention is summed relative to are clipped: the row wins, and nothing overflows."""
    q, codes, scales, table, count, stats = make_case(1, 64, 1, 2, 4, [600], 600)
    scales.fill_(110)
    scales[table[0, 40].long()] = 250  # not among the first rows, nor among those sampled
    worth = twin.scan_rows(q, codes, scales, table, count, stats, 1.0, 2, small(twin)).cpu()[0]
    assert worth.isfinite().all()
    assert worth.argmax() == 40


def test_reference_agrees_with_float64() -> None:
    case = make_case(3, 64, 3, 2, 4, [0, 5, 37], 40)
    worth = plain.scan_rows(*case, 0.1, 2).cpu().double().numpy()
    expected = expected_worth(*case, 0.1, 2)
    assert np.allclose(worth, expected, rtol=1e-4)


def chosen_sets(chosen: Chosen) -> list[set[int]]:
    rows, count = chosen.rows.cpu(), chosen.number.tolist()
    sets = [set(rows[i, :n].tolist()) for i, n in enumerate(count)]
    assert [len(s) for s in sets] == count, "a row was chosen twice"
    assert all((rows[i, n:] == 0).all() for i, n in enumerate(count))
    return sets


def make_worth(counts: list[int], width: int, kind: str, seed: int = 0):
    make = torch.Generator().manual_seed(seed)
    worth = torch.rand(len(counts), width, generator=make)
    if kind == "narrow":  # all share their first digit
        worth = 0.5 + worth / 64
    elif kind == "equal":
        worth = torch.full_like(worth, 0.25)
    elif kind == "zeros":
        worth = worth * (worth > 0.7)
    elif kind == "wide":
        worth = (worth * 60 - 50).exp()
    count = torch.tensor(counts, dtype=torch.int32)
    worth[torch.arange(width) >= count[:, None]] = float("-inf")
    table = torch.randperm(len(counts) * width, generator=make).view(len(counts), width).to(torch.int32)
    return worth.to(DEVICE), table.to(DEVICE), count.to(DEVICE)


@pytest.mark.parametrize("kind", ["plain", "narrow", "equal", "zeros", "wide"])
@pytest.mark.parametrize("budget", [1, 63, 200])
def test_the_best_rows_are_chosen(kind: str, budget: int, twin: ModuleType) -> None:
    worth, table, count = make_worth([123, 0, 1000], 1000, kind)
    chosen = chosen_sets(twin.select_top(worth, table, count, budget, None, small(twin)))
    assert chosen == chosen_sets(plain.select_top(worth, table, count, budget, None))


def test_each_sequence_has_a_budget_of_its_own(twin: ModuleType) -> None:
    worth, table, count = make_worth([123, 77, 123, 5], 123, "plain")
    wanted = torch.tensor([0, 5, 99, 99], dtype=torch.int32, device=DEVICE)
    result = twin.select_top(worth, table, count, 64, wanted, small(twin))
    assert result.number.tolist() == [0, 5, 64, 5]
    assert chosen_sets(result) == chosen_sets(plain.select_top(worth, table, count, 64, wanted))


def test_scan_and_select_is_both_in_turn(twin: ModuleType) -> None:
    case = make_case(2, 64, 2, 2, 4, [50, 3], 50)
    budget, scaling = 9, 0.05
    worth = twin.scan_rows(*case, scaling, 2, small(twin))
    separate = twin.select_top(worth, case[3], case[4], budget, None, small(twin))
    together = twin.scan_and_select(*case, scaling, 2, budget, None, small(twin))
    assert chosen_sets(together) == chosen_sets(separate)


def test_no_rows_at_all(twin: ModuleType) -> None:
    q, codes, scales, table, count, stats = make_case(2, 64, 2, 2, 4, [0, 0], 0)
    assert twin.scan_rows(q, codes, scales, table, count, stats, 1.0, 2).shape == (2, 0)
    chosen = twin.scan_and_select(q, codes[:0], scales[:0], table, count, stats, 1.0, 2, 4, None)
    assert chosen.number.tolist() == [0, 0]
    assert chosen.rows.tolist() == [[0] * 4] * 2


def test_counts_within_wider_tables(twin: ModuleType) -> None:
    """Columns of a table that holds other numbers, too, and a table of rows turned on its side."""
    q, codes, scales, table, count, stats = make_case(2, 64, 2, 2, 4, [50, 3, 0, 41], 50)
    wanted = torch.tensor([0, 9, 9, 5], dtype=torch.int32, device=DEVICE)
    numbers = torch.stack([count, wanted, torch.full_like(count, 50)], 1)
    turned = table.T.contiguous().T
    worth = twin.scan_rows(q, codes, scales, turned, numbers[:, 0], stats, 0.1, 2, small(twin))
    assert torch.equal(worth, twin.scan_rows(q, codes, scales, table, count, stats, 0.1, 2, small(twin)))
    expected = chosen_sets(plain.select_top(worth, table, count, 9, wanted))
    given = (turned, numbers[:, 0], 9, numbers[:, 1])
    assert chosen_sets(twin.select_top(worth.T.contiguous().T, *given, small(twin))) == expected
    chosen = twin.scan_and_select(q, codes, scales, *given[:2], stats, 0.1, 2, *given[2:], small(twin))
    assert chosen_sets(chosen) == expected


@pytest.mark.parametrize("apart", [4, 128])
def test_rows_within_wider_rows(apart: int, twin: ModuleType) -> None:
    """Codes and scales as columns of one pool, whose other bytes belong to others."""
    q, codes, scales, table, count, stats = make_case(2, 128, 4, 2, 4, [63, 5], 63)
    begin, width = apart, codes.shape[1] + scales.shape[1]
    wide = torch.full((len(codes), begin + -(-width // 16) * 16 + apart), 255, dtype=torch.uint8, device=DEVICE)
    end = begin + codes.shape[1]
    wide[:, begin:end], wide[:, end : end + scales.shape[1]] = codes, scales
    apart_codes, apart_scales = wide[:, begin:end], wide[:, end : end + scales.shape[1]]
    expected = twin.scan_rows(q, codes, scales, table, count, stats, 0.1, 2, small(twin))
    worth = twin.scan_rows(q, apart_codes, apart_scales, table, count, stats, 0.1, 2, small(twin))
    if apart == 128:
        assert torch.equal(worth, expected)
    else:  # another twin may have taken it
        used = expected.isfinite()
        assert torch.allclose(worth[used], expected[used], rtol=8e-3)
    chosen = twin.scan_and_select(q, apart_codes, apart_scales, table, count, stats, 0.1, 2, 9, None, small(twin))
    assert chosen.number.tolist() == [9, 5]


def test_what_does_not_fit_is_refused() -> None:
    q, codes, scales, table, count, stats = make_case(2, 64, 2, 2, 4, [5], 5)
    with pytest.raises(FormatError, match=r"a multiple of 2"):
        scan_rows(q[:, :3], codes, scales, table, count, stats, 1.0, 2)
    with pytest.raises(FormatError, match="different rows"):
        scan_rows(q, codes, scales[:, :2], table, count, stats, 1.0, 2)
    with pytest.raises(FormatError, match="adjacent"):
        scan_rows(q, codes.t().contiguous().t(), scales, table, count, stats, 1.0, 2)
    with pytest.raises(FormatError, match="int32"):
        scan_rows(q, codes, scales, table.long(), count, stats, 1.0, 2)
    with pytest.raises(FormatError, match="budget = 0"):
        select_top(torch.zeros(1, 5, device=DEVICE), table, count, 0)
