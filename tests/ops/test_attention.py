"""Attention over packed pages against softmax in float64 over what the pages hold."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse.config import VtqConfig
from hisparse.errors import FormatError
from hisparse.ops.attend import Packed, chunk_samples, flash3, reference
from hisparse.ops.attend import attend as public_attend
from hisparse.ops.attend import select_for_chunk as public_select
from hisparse.ops.fetch import HostRows
from hisparse.ops.pack import pack_pages
from hisparse.ops.sketch import build_sketch, score_sketch
from hisparse.ops.unpack import unpack_pages
from hisparse.vtq import ChannelStats, PageFormat, estimate_stats

# float32: sums of hundreds of products; the others: their own rounding of inputs' products and of the output.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TWINS: list[Any] = [reference]
if importlib.util.find_spec("triton") is not None:
    from hisparse.ops.attend import kernels
    from hisparse.ops.attend import triton as sliced

    TWINS.append(sliced)

each_twin = pytest.mark.parametrize("twin", TWINS, ids=lambda m: m.__name__.rsplit(".", 1)[-1])


@dataclass
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    dense_k: Tensor
    dense_v: Tensor
    packed: list[Packed]
    stats: ChannelStats

    def hand(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.dense_k, self.dense_v


def pages_of(n: int, fmt: PageFormat, stats: ChannelStats, dtype: torch.dtype, make: torch.Generator) -> Tensor:
    k, v = torch.randn(2, n, fmt.tokens, fmt.heads, fmt.head_dim, generator=make)
    return pack_pages((k + 1).to(dtype).to(DEVICE), v.to(dtype).to(DEVICE), stats, fmt)


def case(
    heads: int, group: int, dim: int, chunk: int, dense: int, pages: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32, seed: int = 0, raw: bool = False,
) -> Case:  # fmt: skip
    """`pages`: (number, tokens a page) of each packed part."""
    make = torch.Generator().manual_seed(seed)
    sample = torch.randn(2, 50, heads, dim, generator=make)
    stats = estimate_stats(sample[0] + 1, sample[1], torch.randperm(dim, generator=make)).to(DEVICE)
    packed = []
    for n, tokens in pages:
        fmt = PageFormat.raw(dtype, heads, dim, tokens) if raw else PageFormat.vtq(VtqConfig(), heads, dim, tokens)
        packed.append(Packed(pages_of(n, fmt, stats, dtype, make), fmt))
    q = torch.randn(heads * group, chunk, dim, generator=make).to(dtype)
    k, v = (torch.randn(heads, chunk, dim, generator=make).to(dtype) for _ in range(2))
    dense_k, dense_v = (torch.randn(heads, dense, dim, generator=make).to(dtype) for _ in range(2))
    return Case(*(x.to(DEVICE) for x in (q, k, v, dense_k, dense_v)), packed, stats)


def unpacked(part: Packed, stats: ChannelStats) -> tuple[np.ndarray, np.ndarray]:
    """k, v float64 [tokens, H, D]."""
    k, v = unpack_pages(part.read(stats.k_mean.device), stats, part.fmt, torch.float32)
    return k.flatten(0, 1).double().cpu().numpy(), v.flatten(0, 1).double().cpu().numpy()


def oracle(c: Case, scaling: float, own: list[Packed] | None = None) -> np.ndarray:
    """Each query by itself; `own[t]` is seen by query t alone."""
    q_heads, chunk, _ = c.q.shape
    heads = c.k.shape[0]
    q, k, v = (x.double().cpu().numpy() for x in (c.q, c.k, c.v))
    past = [(x[0], x[1]) for x in (unpacked(part, c.stats) for part in c.packed)]
    past.append((c.dense_k.double().cpu().numpy().swapaxes(0, 1), c.dense_v.double().cpu().numpy().swapaxes(0, 1)))
    out = np.empty(q.shape)
    for t in range(chunk):
        here = [*past, (k[:, : t + 1].swapaxes(0, 1), v[:, : t + 1].swapaxes(0, 1))]
        if own is not None:
            here.append(unpacked(own[t], c.stats))
        keys, values = (np.concatenate([part[i] for part in here]) for i in (0, 1))
        for g in range(q_heads):
            h = g // (q_heads // heads)
            score = keys[:, h] @ q[g, t] * scaling
            weight = np.exp(score - score.max())
            out[g, t] = weight @ values[:, h] / weight.sum()
    return out


def close(found: Tensor, want: np.ndarray, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    np.testing.assert_allclose(found.double().cpu().numpy(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


PARTS = [[], [(5, 8)], [(0, 8), (3, 4)], [(4, 8), (7, 4)], [(1, 1), (2, 13), (3, 5)]]


@each_twin
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 17])
@pytest.mark.parametrize("pages", PARTS, ids=str)
@pytest.mark.parametrize("dense", [0, 13])
def test_attention_is_softmax_over_all_that_is_visible(
    twin: Any, dtype: torch.dtype, chunk: int, pages: list[tuple[int, int]], dense: int
) -> None:
    c = case(2, 3, 64, chunk, dense, pages, dtype, seed=chunk)
    close(twin.attend(*c.hand(), c.packed, c.stats, 0.2), oracle(c, 0.2), dtype)


@each_twin
@pytest.mark.parametrize("turned", ["heads within", "channels without"])
def test_tensors_laid_out_otherwise(twin: Any, turned: str) -> None:
    """Heads within tokens, as a model's projections are, and channels outermost: values lie far apart."""
    c = case(3, 2, 64, 5, 13, [(4, 8)])
    order = (1, 0, 2) if turned == "heads within" else (2, 0, 1)
    back = (1, 0, 2) if turned == "heads within" else (1, 2, 0)
    hand = [x.permute(order).contiguous().permute(back) for x in c.hand()]
    every = torch.tensor([[3, 0], [1, 0], [0, 0], [2, 0]], device=DEVICE)[:, 0]
    packed = [replace(part, ids=every) for part in c.packed]
    close(twin.attend(*hand, packed, c.stats, 0.2), oracle(c, 0.2), torch.float32)


@each_twin
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("chunk", [1, 3])
def test_grouped_queries_read_their_own_head(twin: Any, group: int, heads: int, chunk: int) -> None:
    c = case(heads, group, 32, chunk, 9, [(3, 8), (2, 4)], seed=group)
    close(twin.attend(*c.hand(), c.packed, c.stats, 0.3), oracle(c, 0.3), torch.float32)
    recalled = [Packed(c.packed[1].pages[t % 2 :][:1], c.packed[1].fmt) for t in range(chunk)]
    pages = torch.stack([part.pages for part in recalled])
    kept = Case(*c.hand(), c.packed[:1], c.stats)
    found = twin.attend_recalled(*c.hand(), kept.packed, Packed(pages, c.packed[1].fmt), c.stats, 0.3)
    close(found, oracle(kept, 0.3, recalled), torch.float32)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, or bytes that are NaN as steps of a page: what is left unwritten shows."""

    def fill(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*size: Any, **options: Any) -> Tensor:
            x = make(*size, **options)
            return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(255) if x.dtype == torch.uint8 else x

        return made

    monkeypatch.setattr(torch, "empty", fill(torch.empty))
    monkeypatch.setattr(torch, "empty_like", fill(torch.empty_like))


@each_twin
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("heads", "group", "dim", "dtype"),
    [
        (1, 16, 256, torch.bfloat16), (2, 3, 256, torch.float32), (2, 9, 64, torch.float16),
        (1, 12, 128, torch.float32), (1, 1, 256, torch.float16),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 5])
def test_wide_heads_and_many_queries_a_head(
    twin: Any, heads: int, group: int, dim: int, dtype: torch.dtype, chunk: int
) -> None:
    """All of it by kernels, unpacking as well, in slices of one page or two."""
    c = case(heads, group, dim, chunk, 5, [(3, 8), (5, 4)], dtype, seed=group)
    scaling = dim**-0.5
    kept, rows = c.packed
    assert isinstance(rows.pages, Tensor)
    chosen = torch.tensor([[t, (t + 2) % 5] for t in range(chunk)])
    own = [Packed(rows.pages[ids], rows.fmt) for ids in chosen]
    recalled = Packed(rows.pages[chosen], rows.fmt)
    with pytest.MonkeyPatch.context() as patch:
        if twin is not reference:
            patch.setattr(twin, "WORKSPACE", 16 * 2 * heads * dim * dtype.itemsize)
            patch.setenv("HISPARSE_BACKEND", "triton")
        whole = twin.attend(*c.hand(), c.packed, c.stats, scaling)
        each = twin.attend_recalled(*c.hand(), [kept], recalled, c.stats, scaling)
    close(whole, oracle(c, scaling), dtype)
    close(each, oracle(replace(c, packed=[kept]), scaling, own), dtype)


@each_twin
@settings(max_examples=50, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.sampled_from([8, 40, 64, 96]),
    chunk=st.integers(1, 9),
    dense=st.integers(0, 20),
    pages=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=3),
    raw=st.booleans(),
    scaling=st.floats(0.01, 2),
    seed=st.integers(0, 2**31),
)
def test_any_shape(
    twin: Any, heads: int, group: int, dim: int, chunk: int, dense: int, pages: list[tuple[int, int]], raw: bool,
    scaling: float, seed: int,
) -> None:  # fmt: skip
    c = case(heads, group, dim, chunk, dense, pages, seed=seed, raw=raw)
    inputs = [x.clone() for x in c.hand()]
    found = twin.attend(*c.hand(), c.packed, c.stats, scaling)
    np.testing.assert_allclose(found.double().cpu().numpy(), oracle(c, scaling), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(inputs, c.hand(), strict=True))


@each_twin
@settings(max_examples=50, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    chunk=st.integers(1, 9),
    dense=st.integers(0, 20),
    kept=st.integers(0, 4),
    rows=st.integers(1, 6),
    wanted=st.integers(0, 6),
    row_size=st.integers(1, 5),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**31),
)
def test_each_query_reads_its_own_rows(
    twin: Any, heads: int, group: int, chunk: int, dense: int, kept: int, rows: int, wanted: int, row_size: int,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    c = case(heads, group, 64, chunk, dense, [(kept, 8), (rows, row_size)], dtype, seed)
    source = c.packed.pop()
    make = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(rows, generator=make)[: min(wanted, rows)] for _ in range(chunk)])
    pages = source.pages[chosen]
    found = twin.attend_recalled(*c.hand(), c.packed, Packed(pages, source.fmt), c.stats, 0.2)
    close(found, oracle(c, 0.2, [Packed(pages[t], source.fmt) for t in range(chunk)]), dtype)


@each_twin
@pytest.mark.parametrize("chunk", [1, 5])
def test_recalling_all_rows_is_attending_to_them(twin: Any, chunk: int) -> None:
    c = case(2, 3, 64, chunk, 11, [(4, 8), (9, 4)])
    rows = c.packed[1]
    all_rows = Packed(rows.pages.expand(chunk, -1, -1), rows.fmt)
    one = twin.attend(*c.hand(), c.packed, c.stats, 0.125)
    other = twin.attend_recalled(*c.hand(), c.packed[:1], all_rows, c.stats, 0.125)
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


@each_twin
def test_nothing_packed_needs_no_statistics(twin: Any) -> None:
    c = case(2, 2, 64, 4, 6, [])
    close(twin.attend(*c.hand(), [], None, 0.2), oracle(c, 0.2), torch.float32)


@each_twin
@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([64, 96, 128]),
    chunk=st.integers(1, 20),
    dense=st.integers(0, 20),
    pages=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 3, 4, 8])), max_size=3),
    room=st.integers(8, 100),
    places=st.lists(st.sampled_from(["device", "host", "scattered", "segments", "adjacent"]), min_size=3, max_size=3),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**31),
)
def test_past_in_slices_from_anywhere(
    twin: Any, heads: int, group: int, dim: int, chunk: int, dense: int, pages: list[tuple[int, int]], room: int,
    places: list[str], dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    """Work spaces of a few tokens, pages on the host and on the device, all of a pool or chosen ones."""
    c = case(heads, group, dim, chunk, dense, pages, dtype, seed)
    make = torch.Generator().manual_seed(seed)
    lazy = []
    for part, place in zip(c.packed, places, strict=False):
        stored: Any = part.pages if place == "device" else part.read(torch.device("cpu"))
        ids = None
        if place == "scattered":
            order = torch.randperm(2 * part.count, generator=make)[: part.count]
            pool = torch.full((2 * part.count, part.fmt.page_bytes), 255, dtype=torch.uint8)
            pool[order] = stored
            stored, ids = pool.pin_memory() if DEVICE == "cuda" else pool, order
            ids = ids.to(DEVICE) if seed % 2 else ids
        if place in ("segments", "adjacent"):  # rows 3 .. count + 2, or those in disorder
            order = torch.randperm(part.count, generator=make) if place == "segments" else torch.arange(part.count)
            pool = torch.full((part.count + 12, part.fmt.page_bytes), 255, dtype=torch.uint8)
            pool[order + 3] = stored.cpu()
            cut = [piece.pin_memory() if DEVICE == "cuda" else piece for piece in pool[: len(pool) // 4 * 4].split(4)]
            stored, ids = HostRows.of(cut, torch.device(DEVICE)), order + 3
        lazy.append(Packed(stored, part.fmt, ids))
    with pytest.MonkeyPatch.context() as patch:
        if twin is not reference:
            patch.setattr(twin, "WORKSPACE", room * 2 * heads * dim * dtype.itemsize)
        found = twin.attend(*c.hand(), lazy, c.stats, 0.1)
    close(found, oracle(replace(c, packed=lazy), 0.1), dtype)


@pytest.mark.skipif(len(TWINS) < 2, reason="needs triton")
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (7, 2624), (40, 48)])
def test_gathered_pages_are_those_asked_for(rows: int, size: int) -> None:
    pool = torch.randint(0, 256, (50, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    pool = pool.pin_memory() if DEVICE == "cuda" else pool
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(size))[:rows]
    out = torch.full((rows, size), 7, dtype=torch.uint8, device=DEVICE)
    source = HostRows.of(list(pool.split(10)), torch.device(DEVICE))
    kernels.gather(source, ids.to(DEVICE), out, 3)
    assert torch.equal(out.cpu(), pool[ids])


@settings(max_examples=30, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 9, 16]),
    dim=st.sampled_from([64, 96, 128, 256]),
    chunk=st.integers(1, 120),
    rows=st.integers(1, 60),
    row_size=st.sampled_from([1, 3, 4, 8]),
    bits=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_worth_of_rows_is_the_sum_of_roots_of_attention(
    heads: int, group: int, dim: int, chunk: int, rows: int, row_size: int, bits: int, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, row_size, heads, dim, generator=make) + 3
    stats = estimate_stats(keys.flatten(0, 1), keys.flatten(0, 1), torch.arange(dim)).to(DEVICE)
    codes, scales = build_sketch(keys.to(DEVICE), stats, bits)
    q = torch.randn(heads * group, chunk, dim, generator=make).to(DEVICE)
    count = (rows + 1) // 2
    sample = q[:, chunk_samples(chunk)]
    share = score_sketch(sample, codes, scales, stats, 0.3).double().softmax(-1)
    worth = share.view(*share.shape[:2], rows, row_size).sum(-1).sqrt().sum((0, 1)).cpu()
    least = worth.topk(count).values[-1]
    for twin in TWINS:
        found = twin.select_for_chunk(sample, codes, scales, stats, 0.3, count)
        assert len(set(found.tolist())) == count
        # Float16 keys: rows whose worth differs by less than a percent may change places.
        assert float(worth[found.cpu()].min()) >= 0.99 * float(least)


def test_a_chunk_is_sampled_evenly_and_at_its_end() -> None:
    assert chunk_samples(1).tolist() == [0]
    assert chunk_samples(50).tolist() == list(range(50))
    found = chunk_samples(8192).tolist()
    assert found[0] == 0
    assert found[-16:] == list(range(8176, 8192))
    assert 64 <= len(found) <= 80


def test_a_negative_count_is_refused() -> None:
    stats = ChannelStats.identity(1, 64)
    codes, scales = build_sketch(torch.randn(2, 4, 1, 64), stats, 2)
    with pytest.raises(FormatError, match="count = -1"):
        public_select(torch.randn(1, 3, 64), codes, scales, stats, 1.0, -1)
    assert public_select(torch.randn(1, 3, 64), codes, scales, stats, 1.0, 9).numel() == 2


def test_the_public_operation_reads_the_pages_asked_for() -> None:
    c = case(2, 2, 64, 3, 5, [(6, 4)])
    part = c.packed[0]
    chosen = Packed(part.pages, part.fmt, torch.tensor([4, 1]))
    close(public_attend(*c.hand(), [chosen], c.stats, 0.2), oracle(replace(c, packed=[chosen]), 0.2), torch.float32)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, queries: int, query_ends: Tensor, keys: int, key_ends: Tensor, *,
    softmax_scale: float, causal: bool, out: Tensor, return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention's interface, in float64."""
    assert query_ends.tolist() == [0, queries]
    assert key_ends.tolist() == [0, keys]
    assert return_softmax_lse
    assert (len(q), len(k)) == (queries, keys) == (len(out), len(v))
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ wide_k.mT * softmax_scale
    if causal:
        scores.masked_fill_(~torch.ones_like(scores[0], dtype=torch.bool).tril(), float("-inf"))
    out.copy_((scores.softmax(-1) @ wide_v).transpose(0, 1))
    return out, scores.logsumexp(-1).float()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("pages", PARTS, ids=str)
@pytest.mark.parametrize("dense", [0, 13])
def test_flash_attention_that_another_package_brings(
    pages: list[tuple[int, int]], dense: int, chunk: int, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """strided: queries and results are laid out token by token, as engines have them."""
    if len(TWINS) < 2:
        pytest.skip("needs Triton")
    monkeypatch.setattr(flash3, "_FUNCTION", [varlen])
    monkeypatch.setattr(sliced, "WORKSPACE", 1)  # a slice for each of the largest pages
    c = case(2, 3, 64, chunk, dense, pages, torch.float16, seed=chunk)
    assert flash3.serves(c.q)
    assert not flash3.serves(c.q.float())
    q = c.q.transpose(0, 1).contiguous().transpose(0, 1) if strided else c.q
    found = sliced.attend(q, *c.hand()[1:], c.packed, c.stats, 0.2, "flash3")
    close(found, oracle(c, 0.2), torch.float16)
    assert not strided or found.transpose(0, 1).is_contiguous()


@pytest.mark.skipif(DEVICE == "cpu", reason="a library of GPU kernels")
@pytest.mark.parametrize("library", ["flash3", "cudnn", "flash", "efficient", None])
@pytest.mark.parametrize(("dim", "expanded"), [(64, 1), (128, 1 << 29)])
def test_long_chunks_over_long_pasts_by_each_library(library: str | None, dim: int, expanded: int) -> None:
    if library == "flash3":
        vllm = pytest.importorskip("vllm.vllm_flash_attn")
        if not vllm.is_fa_version_supported(3):
            pytest.skip("not for this device")
        flash3.use(partial(vllm.flash_attn_varlen_func, fa_version=3))
    c = case(2, 4, dim, 1024, 100, [(700, 8), (1100, 4)], torch.bfloat16)
    part = c.packed[1]
    source = HostRows.of([part.pages.cpu().pin_memory()], torch.device(DEVICE))
    packed = [c.packed[0], Packed(source, part.fmt, torch.arange(1100))]
    q, k, v, dense_k, dense_v = (x.double() for x in c.hand())
    want = reference.attend(q, k, v, dense_k, dense_v, c.packed, c.stats, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced, "WORKSPACE", 8192 * 2 * 2 * dim * 2)
        patch.setattr(sliced, "EXPANDED", expanded)
        found = sliced.attend(*c.hand(), packed, c.stats, 0.1, library, library)
    flash3.use(None)
    assert float((found.double() - want).norm() / want.norm()) < 1e-2
