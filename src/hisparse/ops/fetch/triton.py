"""Rows from the host in Triton: one program a sequence keeps the books, then one a row moves its bytes.

A row's bytes are read by the multiprocessors themselves, 16 a thread and load, from the host's pinned memory. The link
needs some hundred KB in flight to be full; one program a row brings a row each, many times that.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.ops.fetch import reference
from hisparse.ops.fetch.types import AGES, HostRows, HotBuffer
from hisparse.ops.scan.kernels import INTERPRET, bound

TILE = 4096
"""Most entries or slots that a program looks at at once."""


@triton.jit
def _ages(p_owner, p_stamp, slot, here, now, AGES: tl.constexpr):
    """Steps since each slot was used, 0: in this step; at most AGES - 1, which empty slots have. And the owners."""
    owner = tl.load(p_owner + slot, mask=here, other=-1)
    stamp = tl.load(p_stamp + slot, mask=here, other=0)
    return tl.where(owner < 0, AGES - 1, tl.minimum(now - stamp, AGES - 1)), owner


@triton.jit
def assign(
    p_rows, p_number, p_table, p_miss_row, p_miss_slot, p_missing, p_slot_of, p_owner, p_stamp, p_first, p_clock,
    p_counters, budget, TILE: tl.constexpr, AGES: tl.constexpr,
):  # fmt: skip
    """The books of one sequence. p_miss_row, p_miss_slot int32 [B, budget], p_missing int32 [B]: what is to be read,
    and where to."""
    i_batch = tl.program_id(0).to(tl.int64)
    p_rows += i_batch * budget
    p_table += i_batch * budget
    p_miss_row += i_batch * budget
    p_miss_slot += i_batch * budget
    number = tl.maximum(tl.minimum(tl.load(p_number + i_batch), budget), 0)
    now = tl.load(p_clock + i_batch) + 1
    first, last = tl.load(p_first + i_batch), tl.load(p_first + i_batch + 1)
    i = tl.arange(0, TILE)
    missing = 0
    for at in range(0, bound(budget), TILE):
        entry = at + i
        wanted = entry < number
        row = tl.load(p_rows + entry, mask=wanted, other=0)
        slot = tl.load(p_slot_of + row, mask=wanted, other=-1)
        found = wanted & (slot >= 0)
        tl.store(p_stamp + slot, now, mask=found)
        tl.store(p_table + entry, tl.where(found, slot, 0), mask=entry < budget)
        absent = (wanted & (slot < 0)).to(tl.int32)
        to = missing + tl.cumsum(absent, 0) - 1
        tl.store(p_miss_row + to, row, mask=absent > 0)
        tl.store(p_miss_slot + to, entry, mask=absent > 0)  # the entry, until there is a slot
        missing += tl.sum(absent, 0)
    tl.debug_barrier()  # other threads read these stamps and misses
    counts = tl.zeros((AGES,), tl.int32)
    for at in range(bound(first), bound(last), TILE):
        slot = at + i
        here = slot < last
        age, _ = _ages(p_owner, p_stamp, slot, here, now, AGES)
        counts += tl.histogram(tl.where(here, age, 0), AGES)
    bins = tl.arange(0, AGES)
    older = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # slots of a greater age
    cut = tl.sum((older >= missing).to(tl.int32), 0)  # the age at which there are enough
    rest = missing - tl.sum(tl.where(bins == cut, older, 0), 0)
    taken = 0
    equal = 0
    for at in range(bound(first), bound(last), TILE):
        if taken < missing:
            slot = at + i
            here = slot < last
            age, owner = _ages(p_owner, p_stamp, slot, here, now, AGES)
            same = (here & (age == cut)).to(tl.int32)
            chosen = (here & (age > cut)) | ((same > 0) & (equal + tl.cumsum(same, 0) <= rest))
            equal += tl.sum(same, 0)
            count = chosen.to(tl.int32)
            miss = taken + tl.cumsum(count, 0) - 1
            taken += tl.sum(count, 0)
            row = tl.load(p_miss_row + miss, mask=chosen, other=0)
            entry = tl.load(p_miss_slot + miss, mask=chosen, other=0)
            tl.store(p_slot_of + owner, -1, mask=chosen & (owner >= 0))
            tl.store(p_owner + slot, row, mask=chosen)
            tl.store(p_slot_of + row, slot, mask=chosen)
            tl.store(p_stamp + slot, now, mask=chosen)
            tl.store(p_table + entry, slot, mask=chosen)
            tl.store(p_miss_slot + miss, slot, mask=chosen)
    tl.store(p_missing + i_batch, missing)
    tl.store(p_clock + i_batch, now)
    p_counters += 2 * i_batch
    tl.store(p_counters, tl.load(p_counters) + number - missing)
    tl.store(p_counters + 1, tl.load(p_counters + 1) + missing)


@triton.jit(do_not_specialize=["width", "n_line"], do_not_specialize_on_alignment=["p_row"])
def move(
    p_addresses, p_row, p_place, p_number, p_device, width, n_line,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr, LIMITED: tl.constexpr,
    TO_HOST: tl.constexpr,
):  # fmt: skip
    """One row of WORDS 32-bit words, between the host and p_device [places, WORDS]. PLACED: p_place says where to,
    else it is the number of the program. LIMITED: p_number says how many of a sequence's `width` entries there are."""
    i_batch = tl.program_id(1).to(tl.int64)
    number = width
    if LIMITED:
        number = tl.minimum(tl.load(p_number + i_batch), width)
    if tl.program_id(0) < number:
        i_entry = i_batch * width + tl.program_id(0)
        row = tl.load(p_row + i_entry)
        place = i_entry
        if PLACED:
            place = tl.load(p_place + i_entry).to(tl.int64)
        p_host = tl.load(p_addresses + row // n_line).to(tl.pointer_type(tl.int32))
        p_host = tl.multiple_of(p_host, 16) + (row % n_line).to(tl.int64) * WORDS
        p_device += place * WORDS
        for at in tl.static_range(0, WORDS, BLOCK):
            word = at + tl.arange(0, BLOCK)
            if TO_HOST:
                tl.store(p_host + word, tl.load(p_device + word, mask=word < WORDS), mask=word < WORDS)
            else:
                tl.store(p_device + word, tl.load(p_host + word, mask=word < WORDS), mask=word < WORDS)


def _move(
    source: HostRows, rows: Tensor, number: Tensor | None, place: Tensor | None, device: Tensor, to_host: bool
) -> None:
    """rows [B, width]; device uint8 [places, row_bytes]."""
    batch, width = rows.shape
    words = source.row_bytes // 4
    block = min(2048, triton.next_power_of_2(words))
    options = {} if INTERPRET else {"num_warps": max(1, min(4, block // 128))}
    move[(width, batch)](
        source.addresses, rows, rows if place is None else place, rows if number is None else number,
        device.view(torch.int32), width, source.per_segment, words, block, place is not None, number is not None,
        to_host, **options,
    )  # fmt: skip


def fetch_rows(hot: HotBuffer, source: HostRows, rows: Tensor, number: Tensor, early: bool = False) -> Tensor:
    """See :func:`hisparse.ops.fetch.fetch_rows`; `early` changes nothing."""
    batch, budget = rows.shape
    rows, number = rows.contiguous(), number.contiguous()
    table = torch.empty_like(rows)
    if not batch or not budget:
        return table
    miss_row, miss_slot = torch.empty(2, batch, budget, dtype=torch.int32, device=rows.device)
    missing = torch.empty(batch, dtype=torch.int32, device=rows.device)
    tile = min(TILE, max(128, triton.next_power_of_2(budget)))
    options = {} if INTERPRET else {"num_warps": max(4, tile // 256)}
    assign[(batch,)](
        rows, number, table, miss_row, miss_slot, missing, hot.slot_of, hot.owner, hot.stamp, hot.first, hot.clock,
        hot.counters, budget, tile, AGES, **options,
    )  # fmt: skip
    _move(source, miss_row, missing, miss_slot, hot.buffer, False)
    return table


def gather_rows(source: HostRows, rows: Tensor, number: Tensor | None) -> Tensor:
    """See :func:`hisparse.ops.fetch.gather_rows`."""
    out = torch.empty(rows.numel(), source.row_bytes, dtype=torch.uint8, device=rows.device)
    _move(source, rows.contiguous(), None if number is None else number.contiguous(), None, out, False)
    return out


def store_rows(source: HostRows, rows: Tensor, pages: Tensor) -> None:
    """See :func:`hisparse.ops.fetch.store_rows`."""
    pages = pages.contiguous().flatten()  # the stride of a single page may be anything: no words could be seen in it
    _move(source, rows.contiguous()[None], None, None, pages, True)


forget_rows = reference.forget_rows
held_rows = reference.held_rows
