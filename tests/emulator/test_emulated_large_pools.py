"""Addresses of 64 bits in CUDA C++, in the emulator: pools of more than 2**33 bytes.

Other twins are taken away: nothing can be handed on to them.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import large_pools
import pytest
import torch
from test_scan_kernels import make_case

from hisparse.ops.decode import cuda as decode
from hisparse.ops.fetch import cuda as fetch
from hisparse.ops.pack import cuda as pack
from hisparse.ops.scan import cuda as scan

CPU = torch.device("cpu")


def test_decode_attention(emulate: Any) -> None:
    emulate(decode, can_run=lambda index: True, _multiprocessors=lambda index: 5, general=None)
    rest: dict[str, Any] = {"extra_logit": None, "extra_value": None, "page_mass": False, "split": "rope"}
    large_pools.check_decode(partial(decode.decode_attention, **rest), CPU)


@pytest.mark.parametrize(
    "tuning", [scan.Tuning(warps=3, stages=2), scan.Tuning(warps=8, stages=1)], ids=["four-kernels", "one-kernel"]
)
def test_scan_and_selection(tuning: scan.Tuning, emulate: Any) -> None:
    emulate(scan, multiprocessors=lambda index: 5, _fallback=None)
    large_pools.check_scan(scan, make_case(2, 128, 8, 2, 4, [41, 0, 30], 50), tuning)


def test_rows_through_a_hot_buffer(emulate: Any) -> None:
    emulate(fetch, triton=None, reference=None)
    large_pools.check_fetch(fetch, CPU)


def test_packing(emulate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(pack, reference=None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    k, v, stats = large_pools.tokens_of(12, CPU)
    assert pack.serves(k[:, None], v[:, None], stats, large_pools.PACKED)
    large_pools.check_pack_tokens(pack, CPU)
    large_pools.check_pack_pages(pack, CPU)
