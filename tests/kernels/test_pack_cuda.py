"""Packing with CUDA C++: the reference's bytes. Compiles without a GPU where NVRTC is installed, runs on one."""

from __future__ import annotations

import pytest
import torch

from hisparse.bench.data import rope_order
from hisparse.errors import FormatError
from hisparse.ops._cuda import can_run, compile_source, has_compiler
from hisparse.ops.pack import reference
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats, estimate_stats

pytest.importorskip("triton")
from hisparse.ops.pack import cuda as twin

on_gpu = pytest.mark.skipif(not can_run(None), reason="needs a GPU of compute capability 9.0 or more")

FORMATS = [
    PageFormat(8, 4, 128, 5, 5, 64),
    PageFormat(4, 8, 128, 5, 4, 64),
    PageFormat(4, 2, 128, 6, 5, 32),
    PageFormat(4, 2, 64, 5, 5, 64),
    PageFormat(16, 1, 64, 4, 6, 64),
    PageFormat(4, 1, 256, 5, 5, 64),
    PageFormat(1, 3, 128, 5, 5, 128),
    PageFormat(2, 2, 64, 5, 5, 16),
]


def name(fmt: PageFormat) -> str:
    return f"{fmt.tokens}tokens-{fmt.heads}x{fmt.head_dim}-K{fmt.k_bits}V{fmt.v_bits}-group{fmt.group}"


def case(fmt: PageFormat, pages: int, dtype: torch.dtype, strided: bool) -> tuple[torch.Tensor, ...]:
    """Keys with offset channels and one constant block, on the CPU. Strided: as a cache has them, heads first."""
    make = torch.Generator().manual_seed(pages)
    inner = (fmt.heads, pages, fmt.tokens) if strided else (pages, fmt.tokens, fmt.heads)
    x = torch.randn((2, *inner, fmt.head_dim), generator=make)
    x[0] += torch.randn(fmt.head_dim, generator=make) * 5
    k, v = (y.permute(1, 2, 0, 3) if strided else y for y in x.to(dtype))
    v[0, :, 0] = 2.5
    return k, v


def statistics(fmt: PageFormat) -> ChannelStats:
    make = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 50, fmt.heads, fmt.head_dim, generator=make)
    return estimate_stats(k * 2 + 1, v, rope_order(fmt.head_dim))


@pytest.mark.parametrize("fmt", FORMATS, ids=name)
def test_formats_of_models_are_served(fmt: PageFormat) -> None:
    k, v = case(fmt, 5, torch.bfloat16, True)
    assert twin.serves(k, v, statistics(fmt), fmt)


def test_what_the_kernel_cannot_hold_or_read_is_left_to_the_other_twin() -> None:
    fmt = PageFormat(8, 2, 128, 5, 5, 64)
    k, v = case(fmt, 3, torch.bfloat16, False)
    stats = statistics(fmt)
    assert twin.serves(k, v, stats, fmt)
    assert not twin.serves(k.float(), v.float(), stats, fmt)
    odd = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    assert not twin.serves(odd, v, stats, fmt)
    scattered = ChannelStats.identity(2, 128, torch.randperm(128, generator=torch.Generator().manual_seed(0)))
    assert not twin.serves(k, v, scattered, fmt)
    for tokens, dim in ((16, 128), (3, 128), (4, 96)):
        other = PageFormat(tokens, 1, dim, 5, 5, dim)
        assert not twin.serves(*case(other, 3, torch.bfloat16, False), statistics(other), other)


@pytest.mark.skipif(not has_compiler(), reason="needs NVRTC")
@pytest.mark.parametrize("fmt", FORMATS[:4], ids=name)
def test_the_source_compiles(fmt: PageFormat) -> None:
    source = (twin.FOLDER / twin.SOURCE).read_text()
    defines = [f"--define-macro={key}={value}" for key, value in twin.macros(fmt, torch.bfloat16, "rope").items()]
    assert compile_source(source, "pack.cu", "sm_90", defines)


@on_gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=name)
@pytest.mark.parametrize("split", ["rope", "never"])
@pytest.mark.parametrize(("pages", "dtype"), [(1, torch.bfloat16), (37, torch.bfloat16), (1000, torch.float16)])
def test_bytes_are_those_of_the_reference(fmt: PageFormat, split: str, pages: int, dtype: torch.dtype) -> None:
    k, v = case(fmt, pages, dtype, strided=pages != 37)
    stats = statistics(fmt)
    want = reference.pack_pages(k, v, stats, fmt, split, 0.15)
    # Contents are laid out as on the CPU: moving a view to the device keeps its strides.
    found = twin.pack_pages(k.cuda(), v.cuda(), stats.to("cuda"), fmt, split, 0.15)
    assert torch.equal(found.cpu(), want)


@on_gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("of_keys", [True, False])
def test_bad_values_are_named_or_counted(value: float, of_keys: bool) -> None:
    fmt = FORMATS[0]
    k, v = (x.cuda() for x in case(fmt, 9, torch.bfloat16, True))
    stats, faults = statistics(fmt).to("cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    good = twin.pack_pages(k, v, stats, fmt, "rope", 0.15, faults)
    assert int(faults) == 0
    (k if of_keys else v)[7, 3, 1, 70] = value
    pages = twin.pack_pages(k, v, stats, fmt, "rope", 0.15, faults)
    assert int(faults) == 1
    assert torch.equal(pages[:7], good[:7])
    what = "K" if of_keys else "V"
    with pytest.raises(FormatError, match=f"{what} of page 7, token 3, head 1, channel 70"):
        twin.pack_pages(k, v, stats, fmt, "rope", 0.15)
