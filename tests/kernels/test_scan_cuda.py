"""What only the CUDA C++ twin of the scan has: shapes, shares of work over many programs, capture. Needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scan_kernels import chosen_sets, expected_worth, make_case, make_worth, needs_gpu

from hisparse.ops._cuda import compile_source, has_compiler, read_source
from hisparse.ops.scan import cuda as twin
from hisparse.ops.scan import reference as plain
from hisparse.ops.scan.cuda import Tuning, plan_heads

SHAPES = [  # heads, head_dim, queries, bits, row_size, counts
    pytest.param(4, 128, 8, 2, 4, [123, 0, 1000, 1], id="4x128-8q-2bit-rows4"),
    pytest.param(8, 128, 4, 2, 8, [63, 1], id="8x128-4q-2bit-rows8"),
    pytest.param(8, 128, 8, 1, 4, [5, 63, 0], id="8x128-8q-1bit-rows4"),
    pytest.param(4, 128, 7, 2, 4, [1000], id="4x128-7q-2bit-rows4"),
    pytest.param(4, 64, 1, 2, 4, [17], id="4x64-1q-2bit-rows4"),
    pytest.param(3, 128, 3, 1, 4, [0, 5, 37], id="3x128-3q-1bit-rows4"),
    pytest.param(1, 256, 16, 2, 8, [123], id="1x256-16q-2bit-rows8"),
    pytest.param(2, 256, 3, 1, 12, [40], id="2x256-3q-1bit-rows12"),
    pytest.param(4, 128, 12, 2, 16, [9, 63], id="4x128-12q-2bit-rows16"),
    pytest.param(6, 128, 2, 2, 4, [63], id="6x128-2q-2bit-rows4"),
    pytest.param(2, 128, 4, 1, 4, [0, 7, *range(40), 123], id="2x128-4q-1bit-43-sequences"),
    pytest.param(2, 96, 7, 2, 4, [123], id="2x96-7q-2bit-another-twin"),
    pytest.param(2, 128, 4, 2, 5, [63], id="2x128-4q-2bit-rows5-another-twin"),
]

OTHERS = [Tuning(), Tuning(whole=False), Tuning(16, 2, weights=4), Tuning(8, 1)]


@needs_gpu
@pytest.mark.parametrize(("heads", "dim", "queries", "bits", "row_size", "counts"), SHAPES)
def test_shapes_agree_with_float64(heads, dim, queries, bits, row_size, counts) -> None:
    case = make_case(heads, dim, queries, bits, row_size, counts, max(counts) + 3)
    scaling = 0.3 * dim**-0.5
    expected = expected_worth(*case, scaling, bits)
    for tuning in (None, Tuning(warps=3, stages=2), *OTHERS):
        worth = twin.scan_rows(*case, scaling, bits, tuning).cpu().double().numpy()
        assert np.array_equal(np.isneginf(worth), np.isneginf(expected))
        used = np.isfinite(expected)
        assert np.abs(worth[used] / expected[used] - 1).max() < 6e-3


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_of_any_dtype_and_stride(dtype: torch.dtype) -> None:
    q, *rest = make_case(2, 128, 4, 2, 4, [123, 63], 123)
    wide = torch.zeros(2, 3, 8, 256, dtype=dtype, device=q.device)
    wide[:, 1, :, :128] = q
    strided = wide[:, 1, :, :128]
    expected = expected_worth(strided, *rest, 0.1, 2)
    worth = twin.scan_rows(strided, *rest, 0.1, 2).cpu().double().numpy()
    used = np.isfinite(expected)
    assert np.abs(worth[used] / expected[used] - 1).max() < 6e-3


@needs_gpu
@pytest.mark.parametrize("tuning", OTHERS)
def test_many_rows_and_the_same_result_each_time(tuning: Tuning) -> None:
    """Several tiles a warp, several programs a sequence, unequal sequences."""
    case = make_case(4, 128, 8, 2, 4, [50000, 3, 20001, 0, 4097], 50000)
    expected = plain.scan_rows(*case, 0.05, 2)
    worth = twin.scan_rows(*case, 0.05, 2, tuning)
    used = expected.isfinite()
    assert torch.equal(used, worth.isfinite())
    assert ((worth[used] / expected[used]) - 1).abs().max() < 6e-3
    for budget in (1, 3072, 60000):
        chosen = twin.scan_and_select(*case, 0.05, 2, budget, None, tuning)
        assert chosen_sets(chosen) == chosen_sets(plain.select_top(worth, case[3], case[4], budget, None))
        for _ in range(3):
            again = twin.scan_and_select(*case, 0.05, 2, budget, None, tuning)
            assert torch.equal(again.rows, chosen.rows)


@needs_gpu
@pytest.mark.parametrize("tuning", OTHERS)
def test_of_rows_that_are_worth_the_same_the_first_are_chosen(tuning: Tuning) -> None:
    q, codes, scales, table, count, stats = make_case(4, 128, 8, 2, 4, [40000, 1500, 0, 9, 1000], 40000)
    codes.copy_(codes[:1].clone()), scales.copy_(scales[:1].clone())
    wanted = torch.tensor([6000, 70, 5, 9, 999], dtype=torch.int32, device=q.device)
    for limits in (None, wanted):
        chosen = twin.scan_and_select(q, codes, scales, table, count, stats, 0.05, 2, 6000, limits, tuning)
        numbers = chosen.number.tolist()
        assert numbers == ([6000, 1500, 0, 9, 1000] if limits is None else [6000, 70, 0, 9, 999])
        assert chosen_sets(chosen) == [set(table[i, :n].tolist()) for i, n in enumerate(numbers)]


@needs_gpu
def test_one_kernel_chooses_what_four_choose() -> None:
    case = make_case(4, 128, 8, 2, 4, [400000, 0, 3000], 400000)  # more roots than shared memory holds
    one, four = (twin.scan_and_select(*case, 0.05, 2, 4096, None, Tuning(whole=whole)) for whole in (True, False))
    # Attention is summed in another order: rows whose worth differs by less than that may change places at the cut.
    for mine, theirs in zip(chosen_sets(one), chosen_sets(four), strict=True):
        assert len(mine) == len(theirs)
        assert len(mine - theirs) <= 2


@needs_gpu
def test_where_all_rows_are_wanted_nothing_is_scored() -> None:
    q, codes, scales, table, count, stats = make_case(4, 128, 8, 2, 4, [3000, 0, 9], 4000)
    nowhere = table + (1 << 30)  # no memory is there
    wanted = torch.tensor([3000, 3, 20], dtype=torch.int32, device="cuda")
    for limits in (wanted, None):
        chosen = twin.scan_and_select(q, codes, scales, nowhere, count, stats, 0.05, 2, 3072, limits)
        for b, n in enumerate((3000, 0, 9)):
            assert int(chosen.number[b]) == n
            assert torch.equal(chosen.rows[b, :n], nowhere[b, :n])
            assert not bool(chosen.rows[b, n:].any())


@needs_gpu
@pytest.mark.parametrize("kind", ["plain", "narrow", "equal", "zeros", "wide"])
@pytest.mark.parametrize("budget", [1, 1000, 7000])
def test_the_best_of_many_rows_are_chosen(kind: str, budget: int) -> None:
    worth, table, count = make_worth([12345, 0, 40000, 1, 2048], 40000, kind)
    chosen = twin.select_top(worth, table, count, budget, None)
    assert chosen_sets(chosen) == chosen_sets(plain.select_top(worth, table, count, budget, None))


@needs_gpu
@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 3000), min_size=1, max_size=5),
    spare=st.integers(0, 9),
    budget=st.integers(1, 3500),
    levels=st.sampled_from([1, 2, 7, 1000000]),
    seed=st.integers(0, 2**31),
)
def test_choices_among_few_levels(counts: list[int], spare: int, budget: int, levels: int, seed: int) -> None:
    """Among rows of equal worth the first are taken, as by the reference."""
    width = max(1, max(counts) + spare)
    make = torch.Generator().manual_seed(seed)
    worth = torch.randint(0, levels, (len(counts), width), generator=make).float().cuda() / levels
    table = torch.randperm(len(counts) * width, generator=make).view(len(counts), width).int().cuda()
    count = torch.tensor(counts, dtype=torch.int32).cuda()
    wanted = torch.randint(0, budget + 9, (len(counts),), generator=make).int().cuda()
    for limits in (None, wanted):
        chosen = twin.select_top(worth, table, count, budget, limits)
        assert chosen_sets(chosen) == chosen_sets(plain.select_top(worth, table, count, budget, limits))


@needs_gpu
def test_a_step_is_captured_and_follows_the_lengths_on_the_device() -> None:
    q, codes, scales, table, count, stats = make_case(4, 128, 8, 2, 4, [3000, 777], 3000)
    step = (codes, scales, table, count, stats, 0.05, 2, 256, None)
    twin.scan_and_select(q, *step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = twin.scan_and_select(q, *step)
    for counts in ([3000, 777], [40, 0], [0, 0], [3000, 100]):
        q.normal_()
        count.copy_(torch.tensor(counts, dtype=torch.int32))
        graph.replay()
        expected = twin.scan_and_select(q, *step)
        assert torch.equal(captured.number, expected.number)
        assert torch.equal(captured.rows, expected.rows)


@pytest.mark.skipif(not has_compiler(), reason="needs CUDA's compiler bindings")
@pytest.mark.parametrize(
    ("heads", "dim", "queries", "bits", "row_size"), [(4, 128, 8, 2, 4), (8, 128, 4, 1, 8), (1, 256, 16, 2, 16)]
)
def test_sources_compile_without_a_gpu(heads: int, dim: int, queries: int, bits: int, row_size: int) -> None:
    plan = plan_heads(heads, dim, bits, queries, row_size)
    assert plan is not None
    macros = {
        "HEADS": heads, "QUERIES": queries, "HEAD_DIM": dim, "BITS": bits, "ROW": row_size, "HB": plan.warp_heads,
        "HG": plan.group_heads, "QP": plan.columns, "NB": plan.operands, "QTYPE": 1, "WARPS": 8, "STAGES": 2, "ONCE": 1,
        "CHOOSE": 1, "SETS": plan.sets, "BLOCKS": plan.blocks, "BINS": 2048, "SHIFT": 15, "REACH": 8,
    }  # fmt: skip
    for path in ("scan/weigh.cu", "scan/scan.cu", "scan/step.cu", "scan/select.cu"):
        # The others derive for themselves what the last is told.
        derived = () if path == "scan/select.cu" else ("SETS", "BLOCKS")
        options = [f"--define-macro={name}={value}" for name, value in macros.items() if name not in derived]
        assert compile_source(read_source(path), path, "sm_90", options).startswith(b"\x7fELF")


@given(
    heads=st.integers(1, 64),
    queries=st.integers(1, 16),
    shape=st.sampled_from([(64, 2), (128, 1), (128, 2), (256, 1), (256, 2)]),
)
def test_plans_cover_all_heads(heads: int, queries: int, shape: tuple[int, int]) -> None:
    dim, bits = shape
    plan = plan_heads(heads, dim, bits, queries, 4)
    assert plan is not None
    assert plan.blocks * plan.warp_heads == heads
    assert plan.warp_heads % plan.group_heads == 0
    assert plan.operands * 8 >= queries
    assert plan.group_heads * plan.columns <= 8 or plan.group_heads == 1
    registers = plan.warp_heads * plan.operands * 6 * plan.words
    assert registers <= 48  # of weights


@given(
    heads=st.sampled_from([1, 2, 4, 8]),
    queries=st.integers(1, 16),
    row_size=st.sampled_from([4, 8, 16]),
    batch=st.integers(1, 8),
    width=st.integers(1, 400000),
)
def test_stages_are_chosen_so_that_no_root_leaves_shared_memory(
    heads: int, queries: int, row_size: int, batch: int, width: int
) -> None:
    plan = plan_heads(heads, 128, 2, queries, row_size, 4)
    assert plan is not None
    programs = min(128, batch * -(-width // 8))
    for stages in (0, 3):
        tune = twin.choose_stages(plan, Tuning(16, stages, weights=4), row_size, batch, width, programs)
        assert tune.stages == 3 if stages else 1 <= tune.stages <= twin.FEW_STAGES
        if not stages and tune.stages > 1:
            room = twin.plan_step(plan, tune, row_size, batch, width, programs)
            assert room is not None
            assert room.near == room.tiles


@pytest.mark.parametrize(
    ("dim", "bits", "queries", "row_size"), [(64, 1, 4, 4), (96, 2, 4, 4), (128, 2, 17, 4), (128, 2, 4, 6)]
)
def test_other_shapes_go_to_another_twin(dim: int, bits: int, queries: int, row_size: int) -> None:
    assert plan_heads(2, dim, bits, queries, row_size) is None
