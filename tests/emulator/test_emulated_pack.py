"""Packing in CUDA C++, in the emulator: the reference's bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_pack_cuda import FORMATS, case, name, statistics

from hisparse.errors import FormatError
from hisparse.ops.pack import cuda as twin
from hisparse.ops.pack import reference
from hisparse.vtq.format import PageFormat


@pytest.fixture(autouse=True)
def _pack(emulate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(twin)
    device = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device_: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.parametrize("fmt", [*FORMATS[:3], *FORMATS[5:7]], ids=name)
def test_bytes_are_those_of_the_reference(fmt: PageFormat) -> None:
    split, dtype = ("rope", torch.bfloat16) if fmt.tokens != 4 else ("never", torch.float16)
    for pages in (1, 37):
        k, v = case(fmt, pages, dtype, strided=pages == 37)
        stats = statistics(fmt)
        assert twin.serves(k, v, stats, fmt)
        want = reference.pack_pages(k, v, stats, fmt, split, 0.15)
        assert torch.equal(twin.pack_pages(k, v, stats, fmt, split, 0.15), want)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_values_are_named_or_counted(value: float) -> None:
    fmt = FORMATS[0]
    k, v = case(fmt, 9, torch.bfloat16, True)
    stats, faults = statistics(fmt), torch.zeros(1, dtype=torch.int32)
    good = twin.pack_pages(k, v, stats, fmt, "rope", 0.15, faults)
    assert int(faults) == 0
    k[7, 3, 1, 70] = value
    pages = twin.pack_pages(k, v, stats, fmt, "rope", 0.15, faults)
    assert int(faults) == 1
    assert torch.equal(pages[:7], good[:7])
    with pytest.raises(FormatError, match="K of page 7, token 3, head 1, channel 70"):
        twin.pack_pages(k, v, stats, fmt, "rope", 0.15)


@pytest.mark.parametrize("fmt", [FORMATS[0], FORMATS[2], FORMATS[3]], ids=name)
def test_tokens_and_pages_lie_anywhere(fmt: PageFormat) -> None:
    make = torch.Generator().manual_seed(fmt.tokens)
    both = torch.randn(211, 2, fmt.heads, fmt.head_dim, generator=make).bfloat16()
    k, v = both[:, 0], both[:, 1]  # as a ring has them
    stats, faults = statistics(fmt), torch.zeros(1, dtype=torch.int32)
    for number in (1, 37):
        tokens = torch.randint(211, (number, fmt.tokens), generator=make)
        places = torch.randperm(50, generator=make)[:number]
        lines = torch.full((50, fmt.page_bytes + 48), 201, dtype=torch.uint8)
        out = lines[:, : fmt.page_bytes]
        want = lines.clone()
        want[places, : fmt.page_bytes] = reference.pack_pages(k[tokens], v[tokens], stats, fmt, "rope", 0.15)
        twin.pack_tokens(k, v, tokens, stats, fmt, "rope", 0.15, faults, out, places)
        assert torch.equal(lines, want)
    assert int(faults) == 0
    v[tokens[5, 0], 0, 3] = float("nan")
    twin.pack_tokens(k, v, tokens[5:6], stats, fmt, "rope", 0.15, faults, out, places[5:6])
    assert int(faults) == 1
