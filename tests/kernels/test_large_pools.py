"""Addresses of 64 bits: on pools of more than 2**33 bytes kernels do what they do on small ones, bit for bit.

On the CPU Triton's interpreter runs them, in memory that is there only where it is used; the CUDA C++ twins have the
same tests in the emulator.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import large_pools
import pytest
import torch
from large_pools import PACKED, ROW_BYTES, far_apart, far_lines, large_pool, make_rows, tokens_of
from scan_tools import make_stats

from hisparse.ops.pack import reference as pack_plain

pytest.importorskip("triton")
from test_scan_kernels import make_case, needs_gpu, small

from hisparse.ops.attend import kernels as attend_kernels
from hisparse.ops.decode import cuda as decode_cuda
from hisparse.ops.decode import triton as decode_triton
from hisparse.ops.fetch import cuda as fetch_cuda
from hisparse.ops.fetch import triton as fetch_triton
from hisparse.ops.pack import cuda as pack_cuda
from hisparse.ops.pack import triton as pack_triton
from hisparse.ops.scan import cuda as scan_cuda
from hisparse.ops.scan import triton as scan_triton
from hisparse.ops.sketch import triton as sketch_triton
from hisparse.ops.unpack import triton as unpack_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def twins(triton: ModuleType, cuda: ModuleType) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "twin", [pytest.param(triton, id="triton"), pytest.param(cuda, id="cuda", marks=needs_gpu)]
    )


@twins(decode_triton, decode_cuda)
def test_decode_attention(twin: Any) -> None:
    rest: dict[str, Any] = {"extra_logit": None, "extra_value": None, "page_mass": False, "split": "rope"}
    large_pools.check_decode(partial(twin.decode_attention, **rest), DEVICE)


def test_decode_attention_over_raw_pages() -> None:
    rest: dict[str, Any] = {"extra_logit": None, "extra_value": None, "page_mass": False, "split": None}
    large_pools.check_decode(partial(decode_triton.decode_attention, **rest), DEVICE, raw=True)


@twins(scan_triton, scan_cuda)
def test_scan_and_selection(twin: Any) -> None:
    large_pools.check_scan(twin, make_case(2, 128, 8, 2, 4, [41, 0, 30], 50), small(twin))


@twins(fetch_triton, fetch_cuda)
def test_rows_through_a_hot_buffer(twin: Any) -> None:
    large_pools.check_fetch(twin, DEVICE)


def test_rows_from_the_host_and_back() -> None:
    near, far, number = make_rows(DEVICE)
    rows, pool = near.segments[0], far.segments[0]
    assert torch.equal(fetch_triton.gather_rows(far, number[None], None), rows)
    found = torch.full_like(rows, large_pools.NONSENSE)
    attend_kernels.gather(far, number.long(), found, 3)
    assert torch.equal(found, rows)
    new = torch.randint(0, 256, (40, ROW_BYTES), generator=torch.Generator().manual_seed(5)).to(torch.uint8).to(DEVICE)
    fetch_triton.store_rows(far, number, new)
    assert torch.equal(pool[number.long()], new)


@twins(pack_triton, pack_cuda)
def test_packing(twin: Any) -> None:
    large_pools.check_pack_tokens(twin, DEVICE)
    large_pools.check_pack_pages(twin, DEVICE)


def test_unpacking() -> None:
    """Pages anywhere in a pool, to heads that lie far apart."""
    k, v, stats = tokens_of(60, DEVICE)
    k, v = (x.view(15, PACKED.tokens, PACKED.heads, PACKED.head_dim) for x in (k, v))
    pages = pack_plain.pack_pages(k, v, stats, PACKED, "rope", 0.15)
    lines, pool = far_lines(15, PACKED.page_bytes).to(DEVICE), large_pool(PACKED.page_bytes, DEVICE)
    pool[lines] = pages
    shape = (PACKED.heads, 60, PACKED.head_dim)
    want = [x.permute(2, 0, 1, 3).reshape(shape) for x in unpack_triton.unpack_pages(pages, stats, PACKED, k.dtype)]
    found_k, found_v = (far_apart(torch.full(shape, float("nan"), dtype=k.dtype, device=DEVICE), 0) for _ in range(2))
    unpack_triton.unpack_into(pool, stats, PACKED, found_k, found_v, lines)
    assert torch.equal(found_k, want[0])
    assert torch.equal(found_v, want[1])


def test_sketches() -> None:
    """Keys anywhere, sketched to lines anywhere."""
    make, stats = torch.Generator().manual_seed(0), make_stats(3, 64).to(DEVICE)
    keys = torch.randn(60, 3, 64, generator=make).bfloat16().to(DEVICE)
    memory = large_pool(keys[0].numel() * 2, DEVICE).view(torch.bfloat16).view(-1, 3, 64)
    lines = far_lines(60, keys[0].numel() * 2).to(DEVICE)
    memory[lines] = keys
    tokens = torch.randperm(60, generator=make).view(15, 4).to(DEVICE)
    codes, scales = sketch_triton.build_sketch(keys[tokens], stats, 2)
    places, pool = far_lines(15, 512, 1).to(DEVICE), large_pool(512, DEVICE)
    pool[places] = large_pools.NONSENSE
    width, marks = codes[0].numel(), scales[0].numel()
    sketch_triton.sketch_tokens(
        memory, lines[tokens], stats, 2, pool[:, :width], pool[:, width : width + marks], places
    )
    assert torch.equal(pool[places, :width], codes.flatten(1))
    assert torch.equal(pool[places, width : width + marks], scales.flatten(1))
    assert (pool[places, width + marks :] == large_pools.NONSENSE).all()
