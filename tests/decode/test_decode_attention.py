"""Decode attention: both twins against float64, at ugly sizes, NaN wherever nothing may be read or left."""

from __future__ import annotations

import copy
import importlib.util
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from decode_oracle import check, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.errors import FormatError, UnsupportedError
from hisparse.ops.decode import DecodeResult, Pages, decode_attention
from hisparse.ops.pack import pack_pages
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def _on_device(case: Any, device: str) -> Any:
    if device == "cpu":
        return case
    case = copy.copy(case)  # the oracle reads the original
    for name in ("q", "dense_k", "dense_v", "dense_len", "extra_logit", "extra_value", "stats"):
        value = getattr(case, name)
        setattr(case, name, None if value is None else value.to(device))
    for name in ("kept", "recalled"):
        pages = getattr(case, name)
        if pages is not None:
            moved = Pages(pages.pool.to(device), pages.table.to(device), pages.count.to(device), pages.fmt)
            setattr(case, name, moved)
    return case


def run_triton(case: Any, monkeypatch: pytest.MonkeyPatch, page_mass: bool = False, **options: Any) -> DecodeResult:
    """The Triton twin, on the GPU where there is one; buffers are born full of NaN."""
    plain = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *size: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(self, *size, **kwargs)
        return out.fill_(float("nan")) if out.dtype.is_floating_point else out

    monkeypatch.setenv("HISPARSE_BACKEND", "triton")
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    case = _on_device(case, "cuda" if torch.cuda.is_available() else "cpu")
    result = decode_attention(*case.arguments(), **case.extras(), page_mass=page_mass, **options)
    return DecodeResult(*(None if x is None else x.cpu() for x in result))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_reference(dtype: torch.dtype) -> None:
    case = make_case(dtype, extra=3)
    check(case, decode_attention(*case.arguments(), **case.extras(), page_mass=True), page_mass=True)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_at_every_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(dtype, queries=3, extra=5, counts=(5, 0), rows=(2, 0), lengths=(37, 0))
    check(case, run_triton(case, monkeypatch))


@needs_triton
@pytest.mark.parametrize(
    ("bits", "split"), [((5, 5), "rope"), ((5, 4), "never"), ((4, 5), "both"), ((6, 6), "never")], ids=str
)
def test_triton_reads_every_width(bits: tuple[int, int], split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(bits=bits, split=split, counts=(3,), rows=None, lengths=(2,), heads=1)
    hint = {} if split == "both" else {"split": split}
    check(case, run_triton(case, monkeypatch, **hint))


@needs_triton
@pytest.mark.parametrize(
    ("dim", "group", "queries", "tokens"),
    [
        *((96, 96, 1, 4), (128, 64, 7, 16), (64, 32, 16, 8), (80, 80, 2, 8), (256, 64, 1, 4), (64, 64, 8, 64)),
        *((256, 32, 1, 4), (64, 8, 2, 8)),
    ],
    ids=str,
)
def test_triton_at_every_shape(
    dim: int, group: int, queries: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Recalled rows are the kept pages' code once more: left out where a tile of several groups takes long to compile.
    rows = (1,) if group == dim else None
    counts = (3 if tokens < 64 else 1,)
    case = make_case(torch.float16, 1, queries, dim, tokens, group=group, counts=counts, rows=rows, lengths=(5,))
    check(case, run_triton(case, monkeypatch, page_mass=True), page_mass=True)


@needs_triton
def test_triton_reads_raw_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(torch.bfloat16, raw=True, counts=(5,), rows=(3,), lengths=(1,), heads=2)
    check(case, run_triton(case, monkeypatch, page_mass=True), page_mass=True)


@needs_triton
@pytest.mark.parametrize("bits", [(5, 5), (6, 4)], ids=str)
@pytest.mark.parametrize(("rise", "value"), [(0.0, 0.0), (18.0, 0.0), (18.0, 3.0), (80.0, -0.5)])
def test_triton_reads_values_that_are_all_alike(
    bits: tuple[int, int], rise: float, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a head that says nothing: their steps are next to nothing, and weights are divided by them."""
    case = make_case(torch.bfloat16, 1, 1, 64, 16, bits, counts=(12,), rows=None, lengths=(1,))
    stats, kept = ChannelStats.identity(1, 64), case.kept
    assert kept is not None
    k = 0.1 * torch.randn(12, 16, 1, 64, generator=torch.Generator().manual_seed(0))
    k[:6, ..., 0], k[6:, ..., 0] = 0, rise
    pool = pack_pages(k.bfloat16(), torch.full(k.shape, value).bfloat16(), stats, kept.fmt, "rope")
    kept = replace(kept, pool=pool, table=torch.arange(12, dtype=torch.int32)[None])
    case = replace(case, q=torch.zeros_like(case.q), stats=stats, kept=kept)
    case.q[..., 0] = 8.0
    check(case, run_triton(case, monkeypatch))


@needs_triton
def test_triton_reads_lengths_within_wider_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and counts as columns, tables turned on their side."""

    def column(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, torch.full_like(x, 1), x + 1], 1)[:, 0]

    case = make_case(counts=(1, 0, 4), rows=(3, 0, 2), lengths=(2, 0, 37))
    case.dense_len = column(case.dense_len)
    for name in ("kept", "recalled"):
        pages = getattr(case, name)
        table = pages.table.T.contiguous().T
        setattr(case, name, Pages(pages.pool, table, column(pages.count), pages.fmt))
    check(case, run_triton(case, monkeypatch, page_mass=True), page_mass=True)


def spread(case: Any) -> Any:
    """The same pages as views into wider rows, with NaN between them."""
    for name in ("kept", "recalled"):
        pages = getattr(case, name)
        wide = torch.full((pages.pool.shape[0], pages.pool.shape[1] + 48), 0xFF, dtype=torch.uint8)
        wide[:, 16 : 16 + pages.pool.shape[1]] = pages.pool
        setattr(case, name, Pages(wide[:, 16 : 16 + pages.pool.shape[1]], pages.table, pages.count, pages.fmt))
    return case


@needs_triton
@pytest.mark.parametrize("raw", [False, True])
def test_triton_reads_pages_inside_wider_rows(raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = spread(make_case(torch.bfloat16, heads=1, raw=raw, counts=(3, 1), rows=(2, 0), lengths=(0, 3)))
    check(case, decode_attention(*case.arguments()))
    check(case, run_triton(case, monkeypatch))


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_triton)])
def test_the_result_goes_where_it_is_wanted(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(torch.bfloat16, heads=1, counts=(3, 1), rows=(2, 0), lengths=(0, 3))
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    room = torch.full((4, *case.q.shape[1:]), float("nan"), dtype=case.q.dtype, device=device)
    target, others = room[: len(case.q)], room[len(case.q) :]
    if backend == "triton":
        result = run_triton(case, monkeypatch, out=target)
    else:
        result = decode_attention(*case.arguments(), out=target)
    check(case, result)
    assert torch.equal(target.cpu(), result.out)
    assert bool(others.isnan().all())
    for wrong in (room, target.float(), target.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(FormatError, match="out is"):
            decode_attention(*case.arguments(), out=wrong)


def test_pages_between_alignments_are_refused() -> None:
    case = make_case()
    wide = torch.zeros(5, case.kept.fmt.page_bytes + 8, dtype=torch.uint8)
    case.kept = Pages(wide[:, 8:], case.kept.table, case.kept.count, case.kept.fmt)
    with pytest.raises(FormatError, match="multiples of 16"):
        decode_attention(*case.arguments())


@needs_triton
def test_triton_cut_into_many_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(heads=1, queries=2, counts=(70, 1), rows=None, lengths=(0, 3), split="rope")
    check(case, run_triton(case, monkeypatch, split="rope"))


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_call_follows_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is captured once; replayed after the lengths on the device have changed, it gives the new answer."""
    case = make_case(torch.bfloat16, counts=(5, 2), rows=(2, 1), lengths=(37, 3))
    device = _on_device(case, "cuda")
    monkeypatch.setenv("HISPARSE_BACKEND", "triton")  # not before the pages are packed, which happens on the CPU
    decode_attention(*device.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = decode_attention(*device.arguments())
    for used in (case, device):
        used.dense_len.sub_(2)
        used.kept.count.sub_(1)
    graph.replay()
    check(case, DecodeResult(*(None if x is None else x.cpu() for x in result)))


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
    tokens=st.sampled_from([1, 4, 8]),
    queries=st.integers(1, 5),
)
@settings(max_examples=15, deadline=None)
def test_reference_on_any_raggedness(counts: list[int], seed: int, tokens: int, queries: int) -> None:
    lengths = tuple((seed >> (3 * i)) % 9 for i in range(len(counts)))
    rows = tuple((seed >> (2 * i)) % 4 for i in range(len(counts)))
    case = make_case(
        torch.float64, 1, queries, 16, tokens, group=16, counts=tuple(counts), rows=rows, lengths=lengths, seed=seed
    )
    check(case, decode_attention(*case.arguments(), page_mass=True), page_mass=True)


def test_nothing_to_attend_to_gives_zero() -> None:
    case = make_case(counts=(0,), rows=(0,), lengths=(0,))
    result = decode_attention(*case.arguments())
    assert bool((result.out == 0).all())
    assert bool(result.lse.isneginf().all())


def test_masses_and_lse_agree() -> None:
    """With nothing but pages, the page masses add up to the whole."""
    case = make_case(torch.float64, lengths=(0, 0, 0))
    result = decode_attention(*case.arguments(), page_mass=True)
    assert result.kept_mass is not None
    assert result.recalled_mass is not None
    parts = []
    for mass, pages in ((result.kept_mass, case.kept), (result.recalled_mass, case.recalled)):
        used = torch.arange(mass.shape[-1]) < pages.count[:, None]
        parts.append(mass.masked_fill(~used[:, None], float("-inf")))
    torch.testing.assert_close(torch.cat(parts, -1).logsumexp(-1), result.lse, atol=1e-5, rtol=1e-5)


def test_extra_token_equals_a_dense_one() -> None:
    """A token given by its score and value counts as one given by its key and value."""
    case = make_case(torch.float64, heads=1, queries=1, counts=(2,), rows=None, lengths=(5,))
    whole = decode_attention(*case.arguments())
    score = (case.dense_k[0, 0, 4] @ case.q[0, 0]) * case.scaling
    case.extra_logit, case.extra_value = score.view(1, 1, 1).float(), case.dense_v[:, :, 4:5].clone()
    case.dense_len = case.dense_len - 1
    split = decode_attention(*case.arguments(), **case.extras())
    torch.testing.assert_close(split.out, whole.out, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(3, 7, 64), "multiple"),
        ("dense_len", torch.zeros(3, dtype=torch.int64), "dense_len"),
        ("dense_v", torch.zeros(3, 2, 5, 64), "dense_v"),
        ("extra_logit", torch.zeros(3, 8, 2), "go together"),
    ],
)
def test_wrong_arguments_are_named(name: str, value: torch.Tensor, message: str) -> None:
    case = make_case()
    setattr(case, name, value)
    with pytest.raises(FormatError, match=message):
        decode_attention(*case.arguments(), **case.extras())


def test_pages_of_other_heads_are_refused() -> None:
    case = make_case()
    case.kept = make_case(heads=1).kept
    with pytest.raises(FormatError, match="1 heads"):
        decode_attention(*case.arguments())


@needs_triton
def test_odd_page_sizes_are_refused_by_the_kernel() -> None:
    from hisparse.ops.decode.triton import check_format

    with pytest.raises(UnsupportedError, match="6 tokens"):
        check_format(PageFormat(6, 1, 64))
