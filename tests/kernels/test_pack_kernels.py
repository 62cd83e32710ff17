"""The Triton twins of packing and unpacking, in the interpreter without a GPU: the reference's bytes, and its
values."""

from __future__ import annotations

import pytest
import torch
from scan_tools import make_stats

from hisparse.errors import FormatError
from hisparse.ops.pack import reference as pack_plain
from hisparse.ops.unpack import reference as unpack_plain
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

pack_twin = pytest.importorskip("hisparse.ops.pack.triton")
unpack_twin = pytest.importorskip("hisparse.ops.unpack.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_kv(
    fmt: PageFormat, pages: int, dtype: torch.dtype, strided: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with offset channels. Strided: as a cache has them, heads first."""
    make = torch.Generator().manual_seed(pages)
    shape = (
        (2, fmt.heads, pages, fmt.tokens, fmt.head_dim) if strided else (2, pages, fmt.tokens, fmt.heads, fmt.head_dim)
    )
    x = torch.randn(shape, generator=make)
    x[0] += torch.randn(fmt.head_dim, generator=make) * 5
    x = x.to(dtype).to(DEVICE)
    k, v = x[0], x[1]
    return (k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)) if strided else (k, v)


def on_cpu(stats: ChannelStats, *tensors: torch.Tensor):
    return (*(t.cpu() for t in tensors), stats.to("cpu"))


FORMATS = [
    PageFormat(8, 2, 64, 5, 5, 64),
    PageFormat(8, 1, 128, 5, 4, 64),
    PageFormat(4, 2, 128, 6, 5, 32),
    PageFormat(5, 1, 96, 5, 5, 96),
    PageFormat(3, 3, 40, 4, 6, 8),
    PageFormat(1, 1, 256, 5, 5, 64),
]


def name(fmt: PageFormat) -> str:
    return f"{fmt.tokens}tokens-{fmt.heads}x{fmt.head_dim}-K{fmt.k_bits}V{fmt.v_bits}-group{fmt.group}"


@pytest.mark.parametrize("fmt", FORMATS, ids=name)
@pytest.mark.parametrize("split", ["rope", "never"])
@pytest.mark.parametrize(("pages", "dtype"), [(1, torch.float32), (5, torch.bfloat16), (6, torch.float16)])
def test_bytes_are_those_of_the_reference(fmt: PageFormat, split: str, pages: int, dtype: torch.dtype) -> None:
    k, v = make_kv(fmt, pages, dtype, strided=pages == 5)
    stats = make_stats(fmt.heads, fmt.head_dim).to(DEVICE)
    packed = pack_twin.pack_pages(k, v, stats, fmt, split, 0.15)
    k_cpu, v_cpu, stats_cpu = on_cpu(stats, k, v)
    assert torch.equal(packed.cpu(), pack_plain.pack_pages(k_cpu, v_cpu, stats_cpu, fmt, split, 0.15))


@pytest.mark.parametrize("value", [0.0, 2.75, -3.0e4])
def test_constant_blocks(value: float) -> None:
    fmt = PageFormat(4, 1, 64, 5, 5, 64)
    k = torch.full((2, 4, 1, 64), value, dtype=torch.bfloat16, device=DEVICE)
    stats = ChannelStats.identity(1, 64).to(DEVICE)
    packed = pack_twin.pack_pages(k, k, stats, fmt, "rope", 0.15)
    k_cpu, stats_cpu = on_cpu(stats, k)
    assert torch.equal(packed.cpu(), pack_plain.pack_pages(k_cpu, k_cpu, stats_cpu, fmt, "rope", 0.15))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("of_keys", [True, False])
def test_bad_values_are_named(value: float, of_keys: bool) -> None:
    fmt = PageFormat(4, 2, 64, 5, 5, 64)
    k, v = make_kv(fmt, 3, torch.float32)
    (k if of_keys else v)[2, 1, 1, 7] = value
    what = "K" if of_keys else "V"
    with pytest.raises(FormatError, match=f"{what} of page 2, token 1, head 1, channel 7"):
        pack_twin.pack_pages(k, v, make_stats(2, 64).to(DEVICE), fmt, "rope", 0.15)


@pytest.mark.parametrize("of_keys", [True, False])
def test_bad_values_are_counted_where_nothing_may_wait(of_keys: bool) -> None:
    fmt = PageFormat(4, 2, 64, 5, 5, 64)
    k, v = make_kv(fmt, 3, torch.float32)
    stats, faults = make_stats(2, 64).to(DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    good = pack_twin.pack_pages(k, v, stats, fmt, "rope", 0.15, faults)
    assert int(faults) == 0
    (k if of_keys else v)[2, 1, 1, 7] = float("nan")
    pages = pack_twin.pack_pages(k, v, stats, fmt, "rope", 0.15, faults)
    assert int(faults) == 1
    assert torch.equal(pages[:2], good[:2])


def test_peaks_and_raw_pages_are_packed_too() -> None:
    fmt = PageFormat(4, 1, 64, 5, 5, 64)
    k, v = make_kv(fmt, 2, torch.float32)
    stats = make_stats(1, 64).to(DEVICE)
    assert torch.equal(
        pack_twin.pack_pages(k, v, stats, fmt, "peaks", 0.1), pack_plain.pack_pages(k, v, stats, fmt, "peaks", 0.1)
    )
    raw = PageFormat.raw(torch.bfloat16, 1, 64, 4)
    pages = pack_twin.pack_pages(k, v, None, raw, "rope", 0.15)
    assert torch.equal(unpack_twin.unpack_pages(pages, None, raw, torch.bfloat16)[0], k.bfloat16())


@pytest.mark.parametrize("fmt", FORMATS, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", ["rope", "peaks"])
def test_unpacked_values(fmt: PageFormat, dtype: torch.dtype, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = make_kv(fmt, 5, torch.float32)
    stats = make_stats(fmt.heads, fmt.head_dim).to(DEVICE)
    pages = pack_plain.pack_pages(k, v, stats, fmt, split, 0.1)
    expected = unpack_plain.unpack_pages(pages, stats, fmt, dtype)
    fresh = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: fresh(*size, **options).fill_(float("nan")))
    for ours, theirs in zip(unpack_twin.unpack_pages(pages, stats, fmt, dtype), expected, strict=True):
        assert ours.stride() == theirs.stride()
        # Two float32 roundings apart; in bfloat16 that can fall on either side of a tie.
        largest = max(stats.k_mean.abs().max(), stats.v_mean.abs().max()) + theirs.float().abs().max()
        bound = 2**-20 * largest + (dtype == torch.bfloat16) * 2**-7 * theirs.float().abs()
        assert ((ours.float() - theirs.float()).abs() <= bound).all()


def test_ids_within_a_wider_table() -> None:
    fmt = PageFormat(4, 1, 64, 5, 5, 64)
    stats = make_stats(1, 64).to(DEVICE)
    pages = pack_plain.pack_pages(*make_kv(fmt, 5, torch.float32), stats, fmt, "rope", 0.1)
    ids = torch.tensor([[4, 0], [2, 1], [0, 3]], device=DEVICE)[:, 0]
    found, expected = (torch.full((2, 1, 12, 64), float("nan"), device=DEVICE) for _ in range(2))
    unpack_twin.unpack_into(pages, stats, fmt, found[0], found[1], ids)
    unpack_plain.unpack_into(pages, stats, fmt, expected[0], expected[1], ids)
    assert torch.allclose(found, expected, atol=1e-4)


def test_no_pages() -> None:
    fmt = PageFormat(4, 1, 64, 5, 5, 64)
    stats = make_stats(1, 64).to(DEVICE)
    k = torch.zeros(0, 4, 1, 64, device=DEVICE)
    pages = pack_twin.pack_pages(k, k, stats, fmt, "rope", 0.15)
    assert pages.shape == (0, fmt.page_bytes)
    assert unpack_twin.unpack_pages(pages, stats, fmt, torch.bfloat16)[0].shape == (0, 4, 1, 64)
