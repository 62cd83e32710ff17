"""Pages that no kernel packs: they are packed in plain torch on a GPU, too, and do no more harm there than others."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_compile_ahead import run

from hisparse.ops.pack import pack_tokens
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS = {
    "peaks": (PageFormat(4, 2, 64, 5, 5, 64), "peaks"),
    "raw": (PageFormat.raw(torch.bfloat16, 2, 64, 4), "rope"),
    "eight groups": (PageFormat(4, 2, 64, 5, 5, 8), "rope"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_values_are_counted(name: str, value: float) -> None:
    """An engine goes on: the other pages are what they are without."""
    fmt, split = FORMATS[name]
    make = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 16, 2, 64, generator=make).bfloat16().to(DEVICE)
    stats, faults = ChannelStats.identity(2, 64).to(DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    tokens, places = torch.arange(16, device=DEVICE).view(4, 4), torch.arange(4, device=DEVICE)
    good, found = torch.zeros(2, 4, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    pack_tokens(k, v, tokens, stats, fmt, split, 0.15, faults, good, places)  # type: ignore[arg-type]
    assert int(faults) == 0
    v[6, 1, 5] = value
    pack_tokens(k, v, tokens, stats, fmt, split, 0.15, faults, found, places)  # type: ignore[arg-type]
    assert int(faults) == 1
    assert torch.equal(found[[0, 2, 3]], good[[0, 2, 3]])


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("vtq", [{"split": "peaks"}, {"channel_group": 8}, {"enable_per_block_quant": False}], ids=str)
def test_what_else_is_launched_was_compiled_ahead(vtq: dict[str, Any]) -> None:
    shape = {"heads": 2, "q_heads": 8, "dim": 64, "context": 8192, "dtype": "bfloat16", "config": {"vtq": vtq}}
    found = json.loads(run("fake_gpu.py", json.dumps(shape)))
    assert found["error"] == "None"
    assert not found["missed"]
