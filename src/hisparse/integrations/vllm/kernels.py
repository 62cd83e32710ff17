"""Triton twins of what a decode step does between choosing rows and reading them; see `hot` and `memory`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Most entries of a request that a program looks at."""


@triton.jit
def _entry(p_record, p_number, budget, TILE: tl.constexpr):
    """Numbers of a program's entries of one request, which of them count, and their rows."""
    i_batch = tl.program_id(1)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_entry = at < tl.minimum(tl.load(p_number + i_batch), budget)
    i_entry = i_batch * budget + at
    return i_entry, m_entry, tl.load(p_record + i_entry, mask=m_entry, other=0)


@triton.jit
def _claim(p_record, p_number, p_claim, p_total, p_shared, budget, TILE: tl.constexpr):
    """Every entry claims its row; the last one to write has it."""
    i_entry, m_entry, row = _entry(p_record, p_number, budget, TILE)
    tl.store(p_claim + row, i_entry, mask=m_entry)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(p_total, 0)
        tl.store(p_shared, tl.load(p_shared) - 1)  # of the step's queries one is counted by the buffer's clock


@triton.jit
def _list(p_record, p_number, p_claim, p_total, p_shared, p_row, p_rank, budget, width, TILE: tl.constexpr):
    """Entries that have their row list it. Programs take their places as they come."""
    i_entry, m_entry, row = _entry(p_record, p_number, budget, TILE)
    own = m_entry & (tl.load(p_claim + row, mask=m_entry, other=-1) == i_entry)
    count = own.to(tl.int32)
    listed = tl.sum(count, 0)
    others = tl.sum(m_entry.to(tl.int32), 0) - listed
    first = tl.atomic_add(p_total, listed)
    place = first + tl.cumsum(count, 0) - 1
    tl.store(p_row + place, row, mask=own & (place < width))
    tl.store(p_rank + i_entry, place, mask=own)
    if others > 0:
        tl.atomic_add(p_shared + 1, others.to(tl.int64))
    if (tl.program_id(0) == 0) & (listed + others > 0):
        tl.atomic_add(p_shared, 1)


@triton.jit
def _hand_out(p_record, p_number, p_claim, p_rank, p_slot, p_table, budget, TILE: tl.constexpr):
    """Every entry gets the slot of the entry that has its row."""
    i_entry, m_entry, row = _entry(p_record, p_number, budget, TILE)
    first = tl.load(p_claim + row, mask=m_entry, other=0)
    rank = tl.load(p_rank + first, mask=m_entry, other=0)
    tl.store(p_table + i_entry, tl.load(p_slot + rank, mask=m_entry, other=0), mask=m_entry)


@triton.jit
def _locate(
    p_record, p_number, p_table, p_rows, p_queries, budget, PER: tl.constexpr, HOST: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Where each entry's row lies, see `BlockLayout.host_id`; and the counts of rows and of queries that want some."""
    i_entry, m_entry, record = _entry(p_record, p_number, budget, TILE)
    tl.store(p_table + i_entry, record // PER * HOST + record % PER - (PER - HOST), mask=m_entry)
    number = tl.minimum(tl.load(p_number + tl.program_id(1)), budget)
    if (tl.program_id(0) == 0) & (number > 0):
        tl.atomic_add(p_rows, number.to(tl.int64))
        tl.atomic_add(p_queries, (number > 0).to(tl.int64))


def _grid(records: Tensor) -> tuple[tuple[int, int], int]:
    """Programs, and entries of each."""
    batch, budget = records.shape
    tile = min(TILE, max(128, triton.next_power_of_2(budget)))
    return (triton.cdiv(budget, tile), batch), tile


def merge_rows(
    records: Tensor, number: Tensor, claims: Tensor, shared: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hisparse.integrations.vllm.hot.merge_rows`."""
    grid, tile = _grid(records)
    records, number, budget = records.contiguous(), number.contiguous(), records.shape[1]
    rows = torch.empty(1, width, dtype=torch.int32, device=records.device)
    total = torch.empty(1, dtype=torch.int32, device=records.device)
    rank = torch.empty(records.numel(), dtype=torch.int32, device=records.device)
    _claim[grid](records, number, claims, total, shared, budget, tile)
    _list[grid](records, number, claims, total, shared, rows, rank, budget, width, tile)
    return rows, total, rank


def hand_out(slots: Tensor, rank: Tensor, records: Tensor, number: Tensor, claims: Tensor) -> Tensor:
    """See :func:`hisparse.integrations.vllm.hot.hand_out`."""
    grid, tile = _grid(records)
    records, number = records.contiguous(), number.contiguous()
    table = torch.empty_like(records)
    _hand_out[grid](records, number, claims, rank, slots, table, records.shape[1], tile)
    return table


def locate(records: Tensor, number: Tensor, per_block: int, host_rows: int, rows: Tensor, queries: Tensor) -> Tensor:
    """See :func:`hisparse.integrations.vllm.hot.locate_rows`; a block has `per_block` records and `host_rows` rows."""
    grid, tile = _grid(records)
    records, number = records.contiguous(), number.contiguous()
    table = torch.empty_like(records)
    _locate[grid](records, number, table, rows, queries, records.shape[1], per_block, host_rows, tile)
    return table
