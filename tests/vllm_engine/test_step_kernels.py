"""The Triton twins of a step's tables and of its dense tokens, against the plain ones."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_memory import CONFIGS
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.integrations.vllm.layout import choose_layout
from hisparse.integrations.vllm.step import _table, make_step

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from hisparse.integrations.vllm import step_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, deadline=None)
@given(
    first=st.integers(0, 7), other=st.integers(0, 9), width=st.integers(1, 300), batch=st.integers(1, 3),
    skip=st.sampled_from([None, 0, 3]), seed=st.integers(0, 99),
)  # fmt: skip
def test_tables(first: int, other: int, width: int, batch: int, skip: int | None, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    pages = torch.randint(1, 1000, (batch, width), generator=make, dtype=torch.int32).to(DEVICE)
    packed = torch.randint(0, width + 1, (batch,), generator=make).to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HISPARSE_BACKEND", "reference")
        ids, count = _table(pages, packed, width, first, other, 21, skip)
    found, number = torch.full_like(ids, -1), torch.full_like(count, -1)
    step_kernels.fill_table(pages, packed, found, number, first, other, 21, skip)
    assert torch.equal(number, count)
    for b in range(batch):
        assert torch.equal(found[b, : count[b]], ids[b, : count[b]])
        assert bool((found[b, count[b] :] == -1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (1, 24), (4, 128)])
@pytest.mark.parametrize("tables", ["whole", "narrowed", "mixed"])
def test_renewed_dense_tokens(heads: int, dim: int, dtype: torch.dtype, tables: str) -> None:
    make = torch.Generator().manual_seed(heads)
    memory = torch.randn(17, 5 * 2 * heads * dim + 16, generator=make).to(dtype).to(DEVICE)
    dense = memory[:, : 5 * 2 * heads * dim].view(17, 5, 2, heads, dim)
    batch, slots = 4, 19
    places = torch.randperm(85, generator=make)[: batch * (slots + 1)].view(batch, -1).to(DEVICE)
    past = torch.tensor([0, 7, 8, 18], dtype=torch.int32, device=DEVICE)
    block, slot = places // 5, places % 5
    columns = {"whole": block[:, :slots].contiguous(), "narrowed": block[:, :slots], "mixed": block[:, :slots]}
    block, slot = columns[tables], slot[:, :slots] if tables == "narrowed" else slot[:, :slots].contiguous()
    new = places.gather(1, past[:, None].long())[:, 0]
    qkv = torch.randn(batch, 5, heads, dim, generator=make).to(dtype).to(DEVICE)
    k, v = qkv[:, 1], qkv[:, 3]
    before = dense.clone()
    out, length = step_kernels.renew(dense, block, slot, past, new // 5, new % 5, k, v)
    assert length.tolist() == [1, 8, 9, 19]
    for b in range(batch):
        n = int(past[b])
        assert torch.equal(out[b, :n], before[block[b, :n], slot[b, :n]])
        assert torch.equal(out[b, n], torch.stack([k[b], v[b]]))
    written = before.clone()
    written[new // 5, new % 5] = torch.stack([k, v], 1)
    assert torch.equal(dense, written)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_whole_step(data: st.DataObject) -> None:
    """Requests of all lengths, with blocks found cached or none, and padding, whatever stands in its rows."""
    name = data.draw(st.sampled_from(["host", "device", "raw"]), "config")
    tail, root = data.draw(st.integers(1, 70), "tail"), data.draw(st.sampled_from([0.0, 12.0, 12.3]), "root")
    more = {"selection": {"min_tokens": 48, "root_factor": root, "rows": "device" if name == "device" else "host"}}
    config = HiSparseConfig(**{**CONFIGS[name], "tlif": {"prefix_length": tail}, **more})
    layout, width = choose_layout(config, 2, 32, torch.float32, 1024, 64), 20
    batch, make = data.draw(st.integers(1, 5), "batch"), torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    columns = width + layout.ring_blocks
    pages = torch.randint(1, 500, (batch, columns), generator=make, dtype=torch.int32).to(DEVICE)
    ring = torch.randint(1, 500, (batch, columns), generator=make, dtype=torch.int32).to(DEVICE)
    past, new = [], []
    for b in range(batch):
        past.append(data.draw(st.integers(0, width * 64 - 1), "past"))
        new.append(data.draw(st.sampled_from([1, 1, 1, 0]), "new"))
        ring[b, : data.draw(st.integers(0, past[b] // 64), "found")] = 0
        if data.draw(st.integers(0, 9), "no ring") == 0:
            ring[b] = 0
    lengths, starts = (ints([x + y for x, y in zip(past, new, strict=True)]), ints([0, *new]).cumsum(0).int())
    if data.draw(st.booleans(), "laid out otherwise"):
        pages, ring = pages.T.contiguous().T, ring.T.contiguous().T
        lengths, starts = (torch.stack([x, x + 1], 1)[:, 0] for x in (lengths, starts))
    most = data.draw(st.sampled_from([None, 0, 7, 40, 10000]), "most")
    arguments = (torch.tensor(past, device=DEVICE), torch.tensor(new, device=DEVICE), width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HISPARSE_BACKEND", "reference")
        step = make_step(layout, config.selection, pages, ring, *arguments)
    each = data.draw(st.sampled_from([0, 9, 200]), "each")
    limited = step if most is None else step.limited(most, each)
    found = step.room(batch)
    step_kernels.fill_step(layout, config.selection, pages, ring, lengths, starts, found, width, most, each)
    for field in ("past", "lead", "packed", "dense_past", "kept_count", "row_count", "wanted"):
        assert torch.equal(getattr(found, field), getattr(limited, field)), field
    for field in ("dense", "new"):
        place, expected = getattr(found, field), getattr(limited, field)
        assert torch.equal(place.block, expected.block), field
        assert torch.equal(place.slot, expected.slot), field
    for table, count in (("kept_table", "kept_count"), ("row_table", "row_count")):
        for b in range(batch):
            used = int(getattr(step, count)[b])
            assert torch.equal(getattr(found, table)[b, :used], getattr(step, table)[b, :used]), table


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
