"""Triton twins of what a decode step does between choosing rows and fetching them; see `hot`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.ops.scan.kernels import INTERPRET, bound

TILE = 4096
"""Most entries that a program looks at at once."""


@triton.jit
def _entry(p_record, p_number, i_entry, entries, budget):
    """Row of each entry of the batch, and whether the entry counts."""
    i_batch = i_entry // budget
    number = tl.load(p_number + i_batch, mask=i_entry < entries, other=0)
    there = (i_entry < entries) & (i_entry - i_batch * budget < number)
    return tl.load(p_record + i_entry, mask=there, other=0), there


@triton.jit
def _merge(
    p_record, p_number, p_claim, p_row, p_total, p_rank, p_shared, batch, budget,
    TILE: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """One program. Every entry claims its row; of the entries that share a row the one whose claim stands is listed."""
    i = tl.arange(0, TILE)
    entries = batch * budget
    for at in range(0, bound(entries), TILE):
        row, there = _entry(p_record, p_number, at + i, entries, budget)
        tl.store(p_claim + row, at + i, mask=there)
    tl.debug_barrier()  # claims are read by other threads
    total = 0
    wanted = 0
    for at in range(0, bound(entries), TILE):
        row, there = _entry(p_record, p_number, at + i, entries, budget)
        own = there & (tl.load(p_claim + row, mask=there, other=-1) == at + i)
        place = total + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(p_row + place, row, mask=own)
        tl.store(p_rank + at + i, place.to(tl.int64), mask=own)
        total += tl.sum(own.to(tl.int32), 0)
        wanted += tl.sum(there.to(tl.int32), 0)
    tl.debug_barrier()  # so are ranks
    for at in range(0, bound(entries), TILE):
        row, there = _entry(p_record, p_number, at + i, entries, budget)
        first = tl.load(p_claim + row, mask=there, other=0)
        rank = tl.load(p_rank + first, mask=there, other=0)
        other = (at + i < entries) & ((first != at + i) | (there == 0))
        tl.store(p_rank + at + i, rank, mask=other)
    tl.store(p_total, total)
    i_batch = tl.arange(0, BATCH)
    number = tl.load(p_number + i_batch, mask=i_batch < batch, other=0)
    queries = tl.sum((number > 0).to(tl.int32), 0)
    tl.store(p_shared, tl.load(p_shared) + queries - 1)
    tl.store(p_shared + 1, tl.load(p_shared + 1) + wanted - total)


def merge_rows(records: Tensor, number: Tensor, claims: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hisparse.integrations.vllm.hot.merge_rows`."""
    batch, budget = records.shape
    records = records.contiguous()
    rows = torch.empty(1, batch * budget, dtype=torch.int32, device=records.device)
    total = torch.empty(1, dtype=torch.int32, device=records.device)
    rank = torch.empty(batch * budget, dtype=torch.int64, device=records.device)
    tile = min(TILE, max(128, triton.next_power_of_2(batch * budget)))
    options = {} if INTERPRET else {"num_warps": max(4, tile // 256)}
    _merge[(1,)](
        records, number, claims, rows, total, rank, shared, batch, budget, tile,
        triton.next_power_of_2(batch), **options,
    )  # fmt: skip
    return rows, total, rank
