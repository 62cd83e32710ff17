"""The scan and the selection in CUDA C++, in the emulator, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_scan_kernels import chosen_sets, expected_worth, make_case, make_worth

from emulator import EmulatedKernel
from hisparse.ops.scan import cuda as twin
from hisparse.ops.scan import reference as plain
from hisparse.ops.scan.bins import BINS, SHIFT, lowest_bin

SMALL = twin.Tuning(warps=3, stages=2)  # too few warps for one kernel
WHOLE = twin.Tuning(warps=8, stages=1)
TUNINGS = [
    pytest.param(SMALL, id="four-kernels"),
    pytest.param(WHOLE, id="one-kernel"),
    pytest.param(replace(WHOLE, stages=2, weights=4), id="one-kernel-fewer-heads-a-warp"),
]


@pytest.fixture(autouse=True)
def scan(emulate: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(twin, multiprocessors=lambda index: 5)
    fresh = torch.empty

    def poisoned(*size: int, **options: Any) -> torch.Tensor:
        x = fresh(*size, **options)
        return x.fill_(float("nan") if x.is_floating_point() else 2**30 if x.dtype == torch.int32 else 0)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize(
    ("heads", "dim", "queries", "bits", "row_size", "counts"),
    [
        pytest.param(4, 128, 8, 2, 4, [63, 0, 130], id="4x128-8q-2bit-rows4"),
        pytest.param(8, 128, 4, 1, 8, [33], id="8x128-4q-1bit-rows8"),
        pytest.param(3, 64, 1, 2, 4, [0, 7, *range(40)], id="3x64-1q-2bit-42-sequences"),
        pytest.param(2, 128, 4, 1, 4, [5, 0, 300, *range(20)], id="2x128-4q-1bit-23-sequences"),
        pytest.param(1, 256, 16, 2, 4, [33], id="1x256-16q-2bit-rows4"),
    ],
)
def test_worth(heads: int, dim: int, queries: int, bits: int, row_size: int, counts: list[int], tuning: Any) -> None:
    case = make_case(heads, dim, queries, bits, row_size, counts, max(counts) + 3)
    scaling = 0.3 * dim**-0.5
    expected = expected_worth(*case, scaling, bits)
    EmulatedKernel.seed = 0
    worth = twin.scan_rows(*case, scaling, bits, tuning).double().numpy()
    used = np.isfinite(expected)
    assert np.array_equal(np.isneginf(worth), ~used)
    # float16 weights change a score by some 1e-3, bfloat16 rounds a head's value to 2**-9
    assert np.abs(worth[used] / expected[used] - 1).max() < 6e-3


@pytest.mark.parametrize("tuning", TUNINGS)
def test_rows_and_queries_within_wider_ones(tuning: Any) -> None:
    q, codes, scales, table, count, stats = make_case(4, 128, 8, 2, 4, [63, 5], 63)
    wide = torch.full((len(codes), 16 + codes.shape[1] + scales.shape[1] + 16), 255, dtype=torch.uint8)
    middle = 16 + codes.shape[1]
    wide[:, 16:middle], wide[:, middle:-16] = codes, scales
    queries = torch.zeros(2, 3, 32, 256, dtype=torch.bfloat16)
    queries[:, 1, :, :128] = q
    case = (queries[:, 1, :, :128], wide[:, 16:middle], wide[:, middle:-16], table, count, stats)
    assert wide.stride(0) % 16 == 0
    expected = expected_worth(case[0], codes, scales, table, count, stats, 0.1, 2)
    worth = twin.scan_rows(*case, 0.1, 2, tuning).double().numpy()
    used = np.isfinite(expected)
    assert np.abs(worth[used] / expected[used] - 1).max() < 6e-3


@pytest.mark.parametrize("tuning", TUNINGS)
def test_the_same_result_in_any_order(tuning: Any) -> None:
    """Several tiles a warp, several programs a sequence: whatever runs or arrives first, all bits are the same."""
    case = make_case(4, 128, 8, 2, 4, [600, 3, 201], 600)
    results = []
    for seed in range(3):
        EmulatedKernel.seed = seed * 100
        worth = twin.scan_rows(*case, 0.05, 2, tuning)
        results.append((worth, *twin.scan_and_select(*case, 0.05, 2, 70, None, tuning)))
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            assert torch.equal(one, another)
    chosen = twin.Chosen(*results[0][1:])
    assert chosen_sets(chosen) == chosen_sets(plain.select_top(results[0][0], case[3], case[4], 70, None))


@pytest.mark.parametrize("tuning", TUNINGS)
def test_sequences_without_rows(tuning: Any) -> None:
    case = make_case(4, 128, 8, 2, 4, [0, 0], 20)
    assert bool(twin.scan_rows(*case, 0.05, 2, tuning).isneginf().all())
    chosen = twin.scan_and_select(*case, 0.05, 2, 7, None, tuning)
    assert chosen.number.tolist() == [0, 0]
    assert not bool(chosen.rows.any())


def test_any_number_of_stages_gives_the_same() -> None:
    """More than a warp has tiles, fewer, and as many (0)."""
    case = make_case(4, 128, 8, 2, 4, [600, 3, 201], 600)
    one, *others = (twin.scan_rows(*case, 0.05, 2, replace(WHOLE, stages=stages)) for stages in (1, 4, 0))
    for other in others:
        assert torch.equal(one, other)


def test_roots_that_do_not_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(4, 128, 8, 2, 4, [600, 3, 201], 600)
    near = twin.scan_rows(*case, 0.05, 2, WHOLE), *twin.scan_and_select(*case, 0.05, 2, 70, None, WHOLE)
    monkeypatch.setattr(twin, "ALL_SHARED", 44 << 10)
    plan = twin.plan_heads(4, 128, 2, 8, 4)
    room = twin.plan_step(plan, WHOLE, 4, 3, 600, 5)
    assert 0 < room.near < room.tiles // 4
    far = twin.scan_rows(*case, 0.05, 2, WHOLE), *twin.scan_and_select(*case, 0.05, 2, 70, None, WHOLE)
    for one, another in zip(near, far, strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize("tuning", TUNINGS[1:])
def test_of_rows_that_are_worth_the_same_the_first_are_chosen(tuning: Any) -> None:
    """More candidates than are compared with each other, sequences that share programs, and one that is empty."""
    q, codes, scales, table, count, stats = make_case(4, 128, 8, 2, 4, [1300, 0, 9, 30], 1300)
    codes.copy_(codes[:1].clone()), scales.copy_(scales[:1].clone())
    wanted = torch.tensor([700, 3, 20, 30], dtype=torch.int32)
    for limits in (None, wanted):
        chosen = twin.scan_and_select(q, codes, scales, table, count, stats, 0.05, 2, 60, limits, tuning)
        numbers = [60, 0, 9, 30]
        assert chosen.number.tolist() == numbers
        assert chosen_sets(chosen) == [set(table[i, :n].tolist()) for i, n in enumerate(numbers)]


@pytest.mark.parametrize(
    ("scaling", "budget", "bottom"),
    [(1e-6, 70, False), (2e-4, 70, False), (0.7, 400, True)],
    ids=["all alike", "one bin", "few rows have all attention"],
)
def test_of_many_candidates_the_best_are_chosen(scaling: float, budget: int, bottom: bool) -> None:
    """More rows in the bin at which the budget runs out than are compared with each other, all of different worth."""
    case = make_case(4, 128, 8, 2, 4, [2900, 60, 1500], 2900)
    wanted = torch.tensor([budget - 6, 70, budget - 37], dtype=torch.int32)
    if bottom:
        few = torch.zeros(len(case[2]), dtype=torch.bool)
        few[case[3][:, :40].long()] = True
        case[2][~few] -= 64  # a sixteenth as long
    worth = twin.scan_rows(*case, scaling, 2, WHOLE)
    base = lowest_bin(32, budget)
    for limits in (None, wanted):
        expected = plain.select_top(worth, case[3], case[4], budget, limits)
        for b in (0, 2):
            bins = ((worth[b, : int(case[4][b])].view(torch.int32) >> SHIFT) - base).clamp(0, BINS - 1)
            cut = bins.sort(descending=True).values[int(expected.number[b]) - 1]
            assert (bins == cut).sum() > twin.FEW
            assert (cut == 0) == bottom
        for seed in range(3):
            EmulatedKernel.seed = seed * 100
            chosen = twin.scan_and_select(*case, scaling, 2, budget, limits, WHOLE)
            assert torch.equal(chosen.number, expected.number)
            assert chosen_sets(chosen) == chosen_sets(expected)


def test_where_all_rows_are_wanted_nothing_is_scored() -> None:
    """Sketches are not even read, and what lies beyond the rows is zero; one sequence that wants less, and all are."""
    q, codes, scales, table, count, stats = make_case(4, 128, 8, 2, 4, [60, 0, 9, 500], 500)
    wanted = torch.tensor([60, 3, 20, 512], dtype=torch.int32)
    nowhere = table + (1 << 30)  # no memory is there
    for limits, budget in ((wanted, 512), (None, 500)):
        chosen = twin.scan_and_select(q, codes, scales, nowhere, count, stats, 0.05, 2, budget, limits, WHOLE)
        assert chosen.number.tolist() == [60, 0, 9, 500]
        for b, n in enumerate(chosen.number.tolist()):
            assert torch.equal(chosen.rows[b, :n], nowhere[b, :n])
            assert not bool(chosen.rows[b, n:].any())
    wanted[3] = 499
    chosen = twin.scan_and_select(q, codes, scales, table, count, stats, 0.05, 2, 512, wanted, WHOLE)
    assert chosen.number.tolist() == [60, 0, 9, 499]
    assert chosen_sets(chosen)[0] == set(table[0, :60].tolist())


def test_one_kernel_chooses_what_four_choose() -> None:
    case = make_case(4, 128, 8, 2, 4, [0, 500, 7, 300], 500)
    wanted = torch.tensor([3, 50, 7, 0], dtype=torch.int32)
    for limits in (None, wanted):
        one, four = (twin.scan_and_select(*case, 0.05, 2, 64, limits, tuning) for tuning in (WHOLE, SMALL))
        assert chosen_sets(one) == chosen_sets(four)


@pytest.mark.parametrize("kind", ["plain", "narrow", "equal", "zeros", "wide"])
def test_the_best_rows_are_chosen(kind: str) -> None:
    worth, table, count = make_worth([1234, 0, 3000, 1], 3000, kind)
    wanted = torch.tensor([0, 5, 2500, 9], dtype=torch.int32)
    for budget, limits in ((63, None), (2600, wanted)):
        chosen = chosen_sets(twin.select_top(worth, table, count, budget, limits))
        assert chosen == chosen_sets(plain.select_top(worth, table, count, budget, limits))


def test_more_rows_than_a_program_holds() -> None:
    worth, table, count = make_worth([300000], 300000, "plain")
    for budget in (1, 4096):
        chosen = chosen_sets(twin.select_top(worth, table, count, budget, None))
        assert chosen == chosen_sets(plain.select_top(worth, table, count, budget, None))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("wait_copies<STAGES - 1>();", "wait_copies<STAGES>();"),
        ("    __syncthreads();\n    if (tid < PC)", "    if (tid < PC)"),
        ("          wait_for_previous();  // sketches", "          // sketches"),
        ("    __syncthreads();\n    if (warp < apart)", "    if (warp < apart)"),
        ("  clear_bins(s_bins);\n  wait_for_previous();", "  clear_bins(s_bins);"),
    ],
    ids=[
        "copies are not waited for",
        "a barrier is missing",
        "weights are not waited for",
        "samples are not waited for",
        "roots are not waited for",
    ],
)
def test_what_is_broken_is_found(old: str, new: str, altered: Any) -> None:
    source = "scan/select.cu" if "clear_bins" in old else "scan/scan.cu"
    case = make_case(4, 128, 8, 2, 4, [600], 600)
    expected = expected_worth(*case, 0.05, 2)
    altered(source, old, new)

    def try_orders() -> None:
        for seed in range(5):
            EmulatedKernel.seed = seed * 100
            worth = twin.scan_rows(*case, 0.05, 2, SMALL).double().numpy()
            assert np.abs(worth / expected - 1).max() < 6e-3

    with pytest.raises(AssertionError):
        try_orders()


def test_sums_that_are_not_waited_for_are_found(altered: Any) -> None:
    case = make_case(4, 128, 8, 2, 4, [600], 600)
    worth = twin.scan_rows(*case, 0.05, 2, WHOLE)
    expected = chosen_sets(plain.select_top(worth, case[3], case[4], 70, None))
    altered("scan/step.cu", "while (!is_there(x[i])) x[i] = hear", "if (false) x[i] = hear")

    def try_orders() -> None:
        for seed in range(5):
            EmulatedKernel.seed = seed * 100
            assert chosen_sets(twin.scan_and_select(*case, 0.05, 2, 70, None, WHOLE)) == expected

    with pytest.raises(AssertionError):
        try_orders()
