"""Decode attention in CUDA C++, in the emulator, against float64."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import decode_oracle
import pytest
import torch
from decode_oracle import Case, check, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

import emulator
from emulator import EmulatedKernel, behind
from hisparse.ops._cuda import read_source
from hisparse.ops.decode import DecodeResult
from hisparse.ops.pack import pack_pages
from hisparse.vtq.stats import ChannelStats

cuda = pytest.importorskip("hisparse.ops.decode.cuda")
COMMON = {"heads": 4, "queries": 8, "dim": 128, "tokens": 8, "group": 64, "split": "rope"}


@pytest.fixture(name="run")
def _run(emulate: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DecodeResult]:
    emulate(cuda, can_run=lambda index: True, _multiprocessors=lambda index: 5)
    plain = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *size: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(self, *size, **kwargs)
        return out.fill_(float("nan")) if out.dtype.is_floating_point else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)

    def decode(case: Case, seed: int, mass: bool = False, split: str = "rope", tuning: Any = None) -> DecodeResult:
        EmulatedKernel.seed = seed
        assert cuda.supports(case.q, case.dense_k, case.kept, case.recalled, case.stats, None, mass, split)
        result: DecodeResult = cuda.decode_attention(*case.arguments(), None, None, mass, split, tuning)
        return result

    return decode


@pytest.mark.parametrize(("dtype", "mass"), [(torch.bfloat16, False), (torch.float16, True)], ids=str)
def test_at_the_common_shape(dtype: torch.dtype, mass: bool, run: Any) -> None:
    case = make_case(dtype, **COMMON, counts=(37, 0, 5), rows=(2, 0, 17), lengths=(37, 0, 3))
    check(case, run(case, 1, mass), page_mass=mass)


def test_the_result_goes_where_it_is_wanted(run: Any) -> None:
    case = make_case(torch.bfloat16, **COMMON, counts=(5,), rows=(2,), lengths=(7,))
    target = torch.full_like(case.q, float("nan"))
    result = cuda.decode_attention(*case.arguments(), None, None, False, "rope", out=target)
    assert result.out is target
    assert torch.equal(target, run(case, 0).out)


def test_counts_tables_and_lengths_within_wider_ones(run: Any) -> None:
    """What lies between their elements belongs to others, and is not read."""

    def column(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x + 1, x, x + 2], -1)[..., 1]

    case = make_case(torch.bfloat16, **COMMON, counts=(37, 0, 5), rows=(2, 0, 17), lengths=(37, 0, 3))
    assert case.kept is not None
    assert case.recalled is not None
    for early in (None, cuda.reserve(case.q, case.dense_k)):
        strided = replace(
            case,
            dense_len=column(case.dense_len),
            kept=replace(case.kept, count=column(case.kept.count)),
            recalled=replace(
                case.recalled, table=column(case.recalled.table), count=column(case.recalled.count)
            ),
        )  # fmt: skip
        check(case, cuda.decode_attention(*strided.arguments(), None, None, False, "rope", early=early))


@pytest.mark.parametrize(
    ("dim", "group", "heads", "queries", "tokens", "split", "bits"),
    [
        (64, 64, 2, 7, 8, "rope", (5, 5)), (128, 128, 1, 8, 16, "never", (5, 4)),
        (256, 64, 1, 5, 4, "rope", (4, 5)), (64, 64, 3, 3, 32, "never", (4, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_at_every_shape(dim, group, heads, queries, tokens, split, bits, run) -> None:  # type: ignore[no-untyped-def]
    counts = (1, 60 // tokens)
    case = make_case(
        torch.float16, heads, queries, dim, tokens, bits, group, split, counts=counts, rows=(9, 1), lengths=(5, 1)
    )
    mass = tokens <= 16
    check(case, run(case, 2, mass, split), page_mass=mass)


@pytest.mark.parametrize(
    ("heads", "queries", "dim", "tokens", "bits", "tuning"),
    [
        (8, 4, 128, 64, (5, 5), None), (6, 2, 128, 32, (4, 5), (4, 2, 1, 0, 3)),
        (4, 3, 128, 8, (5, 4), (2, 3, 1, 0, 2)),
        (8, 1, 64, 4, (5, 5), (3, 2, 1, 0, 2)), (8, 2, 256, 16, (5, 5), None),
    ],
    ids=str,
)  # fmt: skip
def test_blocks_of_some_heads(heads, queries, dim, tokens, bits, tuning, run) -> None:  # type: ignore[no-untyped-def]
    case = make_case(
        torch.bfloat16, heads, queries, dim, tokens, bits, 64, "rope", counts=(1, 150 // tokens),
        rows=(9, 1), lengths=(5, 70),
    )  # fmt: skip
    mass = tokens <= 16
    check(case, run(case, 3, mass, tuning=tuning and cuda.Tuning(*tuning)), page_mass=mass)


@pytest.mark.parametrize("rows", [(70,), (9, 0, 30)], ids=str)
def test_an_early_start_needs_nothing_of_the_kernels_ahead(
    rows: tuple[int, ...], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has waited, all that the scan and the fetch leave is nonsense to it."""
    monkeypatch.setattr(cuda, "_multiprocessors", lambda index: 5 * len(rows) + cuda.programs(1))
    case = make_case(
        torch.bfloat16, **COMMON, counts=(100, 5, 0)[: len(rows)], rows=rows, lengths=(148, 0, 7)[: len(rows)]
    )
    early = cuda.reserve(case.q, case.dense_k)
    assert case.recalled is not None
    behind(case.recalled.pool, case.recalled.table, case.recalled.count)
    tuning = cuda.Tuning(4, 3)
    check(case, cuda.decode_attention(*case.arguments(), None, None, False, "rope", tuning, early=early))


def test_a_late_wait_is_found(run: Any, altered: Any) -> None:
    altered(
        "decode/decode.cu",
        "if (second || !rows_table) break;\n        wait_for_previous();",
        "if (second || !rows_table) break;",
    )
    case = make_case(torch.bfloat16, **COMMON, counts=(9,), rows=(30,), lengths=(5,))
    assert case.recalled is not None
    behind(case.recalled.table, case.recalled.count)
    with pytest.raises(AssertionError):
        check(
            case,
            cuda.decode_attention(
                *case.arguments(), None, None, False, "rope", early=cuda.reserve(case.q, case.dense_k)
            ),
        )


def test_dense_slots_alone(run: Any) -> None:
    case = make_case(torch.bfloat16, **COMMON, counts=(0, 0, 0), rows=None, lengths=(200, 0, 65))
    case.kept = None
    check(case, run(case, 1, split="never"))


@pytest.mark.parametrize("rise", [16.0, 18.0, 40.0])
@pytest.mark.parametrize("value", [0.0, 2.5])
def test_values_that_are_all_alike(rise: float, value: float, run: Any) -> None:
    """Steps next to nothing: weights grow until they leave float32, whatever they are multiplied by."""
    case = make_case(torch.bfloat16, 1, 1, 64, 16, (5, 5), counts=(12,), rows=None, lengths=(1,))
    stats = ChannelStats.identity(1, 64)
    assert case.kept is not None
    k = 0.1 * torch.randn(12, 16, 1, 64, generator=torch.Generator().manual_seed(0))
    k[:6, ..., 0], k[6:, ..., 0] = 0, rise
    pool = pack_pages(k.bfloat16(), torch.full(k.shape, value).bfloat16(), stats, case.kept.fmt, "rope")
    table = torch.arange(12, dtype=torch.int32)[None]
    case = replace(case, q=torch.zeros_like(case.q), stats=stats, kept=replace(case.kept, pool=pool, table=table))
    case.q[..., 0] = 8.0
    for tuning in (None, cuda.Tuning(1, 2)):
        check(case, run(case, 0, tuning=tuning))


@pytest.mark.parametrize(("counts", "rows"), [((160,), (70,)), ((10,), (150,)), ((0,), (190,))], ids=str)
def test_long_shares_in_any_order(
    counts: tuple[int, ...], rows: tuple[int, ...], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of more stages than the pipeline is deep, warps and copies in different orders: the same result."""
    monkeypatch.setattr(cuda, "_multiprocessors", lambda index: 1)
    case = make_case(torch.bfloat16, **COMMON, counts=counts, rows=rows, lengths=(148,))
    want = decode_oracle.expected(case)
    monkeypatch.setattr(decode_oracle, "expected", lambda case: want)
    for tuning, seeds in ((None, range(2)), (cuda.Tuning(3, 2), range(3, 5))):
        for seed in seeds:
            check(case, run(case, seed, tuning=tuning))


def test_a_ring_that_is_too_short_is_found(run: Any, altered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps that run ahead overwrite page ids that others still need."""
    monkeypatch.setattr(cuda, "_multiprocessors", lambda index: 1)
    altered("decode/decode.cu", "constexpr int WAITING = 16;", "constexpr int WAITING = 4;")
    altered("decode/decode.cu", 'static_assert(STAGES + 2 <= WAITING, "too many stages");', "")
    case = make_case(torch.bfloat16, **COMMON, counts=(160,), rows=None, lengths=(1,))
    want = decode_oracle.expected(case)
    monkeypatch.setattr(decode_oracle, "expected", lambda case: want)

    def try_orders() -> None:
        for seed in range(10):
            check(case, run(case, seed))

    with pytest.raises(AssertionError):
        try_orders()


def test_a_stage_that_is_not_waited_for_is_found(run: Any, altered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_multiprocessors", lambda index: 1)
    altered("decode/decode.cu", "barrier_wait(ring.full + 8 * place.stage, place.parity);", "")
    case = make_case(torch.bfloat16, **COMMON, counts=(60,), rows=None, lengths=(1,))
    with pytest.raises(AssertionError):
        check(case, run(case, 0))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 140), st.integers(0, 30), st.integers(0, 900))
def test_every_unit_has_one_block(blocks: int, jobs: int, units: int) -> None:
    """Whatever has dense slots: each unit of kept pages, and of rows, is one block's turn."""
    busy = min(jobs, max(1, blocks // 2))
    for rows in (0, 1):
        taken = (ctypes.c_int * (units + 1))()
        assert _turns().take(blocks, busy, rows, units, taken) == 0
        assert list(taken)[:units] == [1] * units


@functools.cache
def _turns() -> ctypes.CDLL:
    """The kernel's own struct Turns, on its own."""
    found = re.search(r"^struct Turns \{.*?^\};", read_source("decode/decode.cu"), re.M | re.S)
    assert found
    folder, _ = emulator._folder()
    source = folder / "turns.cpp"
    source.write_text(f"""#include <algorithm>
        using std::max; using std::min;
        #define __device__
        {found[0]}
        extern "C" int take(int blocks, int busy, bool rows, int units, int* taken) {{
          for (int own = 0; own < blocks; own++) {{
            const Turns turns = {{own, blocks, busy}};
            const int number = turns.number(rows, units);
            for (int n = 0, before = -1; n < number; before = turns.unit(rows, n++)) {{
              const int unit = turns.unit(rows, n);
              if (unit <= before || unit >= units) return 1;
              taken[unit]++;
            }}
            if (turns.unit(rows, number) < units) return 1;
          }}
          return 0;
        }}""")
    emulator._gcc("-shared", "-o", source.with_suffix(".so"), source)
    return ctypes.CDLL(str(source.with_suffix(".so")))
