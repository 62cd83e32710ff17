"""Pages: every bit pattern reads as described, values lie within half a step, the same values give the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vtq_oracle import Decoded, decode

from hisparse.errors import FormatError
from hisparse.ops.pack import pack_pages
from hisparse.ops.unpack import unpack_pages
from hisparse.vtq import ChannelStats, PageFormat, estimate_stats

SHAPES = [
    (8, 3, 64, 64),
    (4, 1, 128, 64),
    (1, 2, 96, 96),
    (3, 1, 256, 64),
    (7, 2, 8, 8),
    (5, 1, 40, 20),
    (13, 3, 64, 32),
]
BITS = [(5, 5), (4, 4), (6, 6), (5, 4), (6, 5)]
SPLITS = ["rope", "peaks", "never"]


def half_split_order(dim: int) -> Tensor:
    index = torch.arange(dim)
    slow = index % (dim // 2) >= dim // 4
    return torch.cat([index[slow], index[~slow]])


def random_stats(heads: int, dim: int, seed: int = 0) -> ChannelStats:
    make = torch.Generator().manual_seed(seed)
    mean = torch.randn(2, heads, dim, generator=make) * 5
    scale = torch.rand(2, heads, dim, generator=make) * 2 + 0.1
    return ChannelStats(mean[0], scale[0], mean[1], scale[1], half_split_order(dim))


def decode_all(pages: Tensor, fmt: PageFormat) -> list[tuple[Decoded, Decoded]]:
    shape = (fmt.tokens, fmt.heads, fmt.head_dim, fmt.k_bits, fmt.v_bits, fmt.group)
    return [decode(bytes(page.tolist()), *shape) for page in pages]


def denormalised(d: Decoded, mean: Tensor, scale: Tensor, order: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Values and step of a decoded tensor in channel order, float64 [P, H, D]."""
    m, s = mean.double().numpy(), scale.double().numpy()
    values, steps = np.empty_like(d.values), np.empty_like(d.step)
    values[..., order.numpy()], steps[..., order.numpy()] = d.values, d.step
    return values * s + m, steps * s


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", BITS, ids=str)
def test_every_byte_reads_as_described(shape: tuple[int, int, int, int], bits: tuple[int, int]) -> None:
    tokens, heads, dim, group = shape
    fmt = PageFormat(tokens, heads, dim, *bits, group)
    # byte j of page i is i * 151 + j * 37 mod 256: over 256 pages each byte of each plane takes all its values
    count = 256 if dim <= 64 else 32
    pages = ((torch.arange(count)[:, None] * 151 + torch.arange(fmt.page_bytes) * 37) % 256).to(torch.uint8)
    make = torch.Generator().manual_seed(1)
    for field in (fmt.k, fmt.v):
        blocks = heads * fmt.groups
        step = torch.rand(count, blocks, generator=make) + 0.01
        step[torch.rand(count, blocks, generator=make) < 0.5] *= -1
        zero = torch.randn(count, blocks, generator=make) * 4
        stored = torch.stack([step if field.bits == 5 else step.abs(), zero], -1).bfloat16()
        pages[:, field.scales : field.scales + blocks * 4] = stored.view(count, -1).view(torch.uint8)
    stats = random_stats(heads, dim)
    k, v = unpack_pages(pages, stats, fmt, torch.float32)
    for i, (of_k, of_v) in enumerate(decode_all(pages[:: count // 32], fmt)):
        want, _ = denormalised(of_k, stats.k_mean, stats.k_scale, stats.order)
        np.testing.assert_allclose(k[i * (count // 32)].double().numpy(), want, rtol=1e-5, atol=1e-4)
        want, _ = denormalised(of_v, stats.v_mean, stats.v_scale, torch.arange(dim))
        np.testing.assert_allclose(v[i * (count // 32)].double().numpy(), want, rtol=1e-5, atol=1e-4)


def check_round_trip(
    k: Tensor, v: Tensor, stats: ChannelStats, fmt: PageFormat, split: str, threshold: float = 0.15
) -> None:
    pages = pack_pages(k, v, stats, fmt, split, threshold)  # type: ignore[arg-type]
    assert torch.equal(pages, pack_pages(k.clone(), v.clone(), stats, fmt, split, threshold))  # type: ignore[arg-type]
    new_k, new_v = unpack_pages(pages, stats, fmt, torch.float32)
    for i, (of_k, of_v) in enumerate(decode_all(pages, fmt)):
        identity = torch.arange(fmt.head_dim)
        for x, new, d, mean, scale, order, bits in (
            (k, new_k, of_k, stats.k_mean, stats.k_scale, stats.order, fmt.k_bits),
            (v, new_v, of_v, stats.v_mean, stats.v_scale, identity, fmt.v_bits),
        ):
            want, steps = denormalised(d, mean, scale, order)
            old = x[i].double().numpy()
            # Normalising, scaling to a code and back are a handful of float32 roundings, each 2^-24 of its operands:
            # the value, the mean, and zero and top code times the scale (both within the block's own magnitude).
            magnitude = np.abs(old) + np.abs(mean.numpy()) + np.abs(want) + steps * 63
            slack = magnitude * 2.0**-20
            assert (np.abs(want - old) <= steps / 2 + slack).all()
            np.testing.assert_array_less(np.abs(new[i].double().numpy() - want), slack + 1e-30)
            if bits == 5 and split != "peaks":
                assert (d.split == (split == "rope" and x is k)).all()
            if bits != 5:
                assert not d.split.any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_every_value_lies_within_half_a_step(
    shape: tuple[int, int, int, int], bits: tuple[int, int], split: str
) -> None:
    tokens, heads, dim, group = shape
    make = torch.Generator().manual_seed(tokens + dim)
    k, v = torch.randn(2, 2, tokens, heads, dim, generator=make) * 3
    check_round_trip(k + 2, v, random_stats(heads, dim), PageFormat(tokens, heads, dim, *bits, group), split)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    heads=st.integers(1, 3),
    eighths=st.integers(1, 6),
    bits=st.sampled_from(BITS),
    split=st.sampled_from(SPLITS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    exponent=st.integers(-12, 12),
    offset=st.floats(-100, 100),
    seed=st.integers(0, 2**31),
)
def test_round_trip_of_any_shape_size_and_dtype(
    tokens: int, heads: int, eighths: int, bits: tuple[int, int], split: str, dtype: torch.dtype, exponent: int,
    offset: float, seed: int,
) -> None:  # fmt: skip
    dim = 8 * eighths
    make = torch.Generator().manual_seed(seed)
    scale = 2.0 ** min(exponent, 8 if dtype == torch.float16 else 12)  # within the range of float16
    k, v = (torch.randn(2, 1, tokens, heads, dim, generator=make) + offset).mul(scale).to(dtype)
    stats = ChannelStats(
        torch.randn(heads, dim, generator=make) * scale, torch.rand(heads, dim, generator=make) * scale + scale / 50,
        torch.zeros(heads, dim), torch.ones(heads, dim), torch.randperm(dim, generator=make),
    )  # fmt: skip
    check_round_trip(k, v, stats, PageFormat(tokens, heads, dim, *bits, dim), split)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    bits=st.sampled_from(BITS),
    split=st.sampled_from(["rope", "never"]),
    group=st.sampled_from([16, 32]),
)
def test_packing_what_was_unpacked_gives_the_same_bytes(
    seed: int, bits: tuple[int, int], split: str, group: int
) -> None:
    # True where a block uses its lowest and its highest code (then min and max give zero and step back) and zero and
    # step are close enough in size for zero + code * step to be exact in float32.
    fmt = PageFormat(3, 2, 32, *bits, group)
    make = torch.Generator().manual_seed(seed)
    pages = torch.zeros(2, fmt.page_bytes, dtype=torch.uint8)
    rows, pairs = 2 * 3, group // 2
    for field in (fmt.k, fmt.v):
        blocks = fmt.heads * fmt.groups
        step = (torch.rand(2, blocks, generator=make) + 0.5).bfloat16()
        zero = (torch.rand(2, blocks, generator=make) * 8 - 9).bfloat16()
        if split == "rope" and field is fmt.k and field.bits == 5:
            step = -step
        pages[:, field.scales : field.scales + blocks * 4] = torch.stack([step, zero], -1).view(2, -1).view(torch.uint8)
        for start, size in ((field.nibbles, rows * 16), (field.extra, rows * 4 * (field.bits - 4))):
            pages[:, start : start + size] = torch.randint(0, 256, (2, size), generator=make, dtype=torch.uint8)
        nibbles = pages[:, field.nibbles : field.nibbles + rows * 16].view(2, 2, 3, 16)
        extra = pages[:, field.extra : field.extra + rows * 4 * (field.bits - 4)].view(2, 2, 3, -1)
        for g in range(fmt.groups):  # pair g * pairs: a = 0 in token 0, a = top in token 1
            j = g * pairs
            nibbles[:, :, 0, j] &= 0xF0
            nibbles[:, :, 1, j] |= 0x0F
            if field.bits > 4:
                mask = 3 << (2 * (j // 4))
                extra[:, :, 0, j % 4] &= 0xFF ^ mask
                extra[:, :, 1, j % 4] |= mask
    stats = ChannelStats.identity(2, 32, half_split_order(32))
    k, v = unpack_pages(pages, stats, fmt, torch.float32)
    assert torch.equal(pack_pages(k, v, stats, fmt, split), pages)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_a_block_of_one_value_is_exact(dtype: torch.dtype, bits: tuple[int, int], split: str) -> None:
    values = [0.0, 1.0, -1.0, 1.2345, -777.77, 3e-5, 6e4, -1e-7]
    x = torch.tensor(values, dtype=dtype)[:, None, None, None].expand(-1, 8, 2, 64)
    fmt = PageFormat(8, 2, 64, *bits, 64)
    stats = ChannelStats.identity(2, 64, half_split_order(64))
    k, v = unpack_pages(pack_pages(x, x, stats, fmt, split), stats, fmt, dtype)  # type: ignore[arg-type]
    assert torch.equal(k, x)
    assert torch.equal(v, x)


def test_golden_page() -> None:
    """The layout may not change silently: two tokens of one head of 16 channels, five bits, K split and V not."""
    fmt = PageFormat(2, 1, 16, 5, 5, 16)
    k = (torch.arange(32) * 7 % 32).float().view(1, 2, 1, 16) - 5
    v = (torch.arange(32) * 11 % 32).float().view(1, 2, 1, 16) / 4
    stats = ChannelStats.identity(1, 16, half_split_order(16))
    page = pack_pages(k, v, stats, fmt)[0]
    assert bytes(page.tolist()).hex() == GOLDEN
    new_k, new_v = unpack_pages(page[None], stats, fmt, torch.float32)
    assert torch.equal(new_v, v)  # 32 levels a quarter apart: V is exact
    assert float((new_k - k).abs().max()) <= 31 / 15 / 2 * (1 + 2**-6)


GOLDEN = (
    "093674a3c9f7346288b7f5224876b5e3"  # K nibbles, two tokens
    "27788dd2000000000000000000000000"  # K extra: two bytes a token, padding
    "803be6914cf7a25d803be6914cf7a25d"  # V nibbles
    "861879e7000000000000000000000000"  # V extra
    "fcbea0c0000000000000000000000000"  # K: step 0.4921875 (sign set: split), zero -5
    "803e0000000000000000000000000000"  # V: step 0.25, zero 0
)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensor", ["K", "V"])
@pytest.mark.parametrize("raw", [False, True], ids=["packed", "raw"])
def test_inf_and_nan_are_refused_by_place(bad: float, dtype: torch.dtype, tensor: str, raw: bool) -> None:
    fmt = PageFormat.raw(dtype, 2, 64, 4) if raw else PageFormat(4, 2, 64)
    x = torch.zeros(9, 4, 2, 64, dtype=dtype)
    y = x.clone()
    y[7, 3, 1, 50] = bad
    stats = random_stats(2, 64)
    with pytest.raises(FormatError, match=rf"^{tensor} of page 7, token 3, head 1, channel 50 is {bad}; only finite"):
        pack_pages(y if tensor == "K" else x, y if tensor == "V" else x, stats, fmt)


def test_a_bad_value_in_a_later_chunk_is_named_by_its_own_page() -> None:
    fmt = PageFormat(8, 8, 128)
    k = torch.zeros(80, 8, 8, 128)
    v = k.clone()
    v[77, 1, 2, 3] = float("nan")
    with pytest.raises(FormatError, match="V of page 77, token 1, head 2, channel 3 is nan"):
        pack_pages(k, v, random_stats(8, 128), fmt)


def test_values_beyond_the_range_are_refused() -> None:
    fmt = PageFormat(1, 1, 8, 5, 5, 8)
    k = torch.zeros(1, 1, 1, 8)
    v = k.clone()
    v[..., 0], v[..., 1] = 3e38, -3e38
    with pytest.raises(FormatError, match=r"V of page 0, head 0: magnitude 3e\+38 is beyond the range"):
        pack_pages(k, v, ChannelStats.identity(1, 8), fmt)
    with pytest.raises(FormatError, match=r"V of page 0, head 0: magnitude 3e\+38 is beyond the range"):
        pack_pages(k, v, None, PageFormat.raw(torch.float16, 1, 8, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_raw_pages_hold_values_unchanged(dtype: torch.dtype) -> None:
    fmt = PageFormat.raw(dtype, 3, 20, 5)
    k, v = torch.randn(2, 7, 5, 3, 20).to(dtype)
    pages = pack_pages(k, v, None, fmt)
    assert pages.shape == (7, fmt.page_bytes)
    new_k, new_v = unpack_pages(pages, None, fmt, dtype)
    assert torch.equal(new_k, k)
    assert torch.equal(new_v, v)


@pytest.mark.parametrize("raw", [False, True], ids=["packed", "raw"])
@pytest.mark.parametrize("n", [0, 1, 200])
def test_heads_come_out_ready_for_attention(raw: bool, n: int) -> None:
    fmt = PageFormat.raw(torch.float32, 3, 64, 8) if raw else PageFormat(8, 3, 64)
    k, v = torch.randn(2, n, 8, 3, 64)
    stats = random_stats(3, 64)
    for x in unpack_pages(pack_pages(k, v, stats, fmt), stats, fmt, torch.float32):
        assert x.shape == (n, 8, 3, 64)
        assert x.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("split", SPLITS)
def test_pages_do_not_depend_on_their_neighbours(split: str) -> None:
    fmt = PageFormat(8, 3, 64)
    k, v = torch.randn(2, 300, 8, 3, 64)
    stats = estimate_stats(k, v, half_split_order(64))
    pages = pack_pages(k, v, stats, fmt, split)  # type: ignore[arg-type]
    pick = torch.tensor([0, 170, 299])
    assert torch.equal(pack_pages(k[pick], v[pick], stats, fmt, split), pages[pick])  # type: ignore[arg-type]
    for whole, some in zip(
        unpack_pages(pages, stats, fmt, torch.bfloat16),
        unpack_pages(pages[pick], stats, fmt, torch.bfloat16),
        strict=True,
    ):
        assert torch.equal(whole[pick], some)


def test_input_that_does_not_fit_is_refused() -> None:
    fmt, stats = PageFormat(8, 3, 64), random_stats(3, 64)
    x = torch.zeros(2, 8, 3, 64)
    for k, v, s, message in (
        (x[:, :7], x, stats, r"k has shape \[2, 7, 3, 64\]; this format takes \[n, 8, 3, 64\]"),
        (x, x[0], stats, "v has shape"),
        (x.int(), x.int(), stats, "k is torch.int32"),
        (x, x[:1], stats, "differ"),
        (x, x, None, "needs channel statistics"),
        (x, x, random_stats(2, 64), "2 heads x 64 channels, the format of 3 x 64"),
    ):
        with pytest.raises(FormatError, match=message):
            pack_pages(k, v, s, fmt)
    with pytest.raises(FormatError, match="split = 'half'"):
        pack_pages(x, x, stats, fmt, "half")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"pages are torch.uint8 \[2, 1936\]; this format has uint8 \[n, 1952\]"):
        unpack_pages(torch.zeros(2, 1936, dtype=torch.uint8), stats, fmt, torch.float32)
