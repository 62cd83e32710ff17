"""Rows from the host in Triton: one program a sequence keeps the books, then many move the rows.

A row's bytes are read by the multiprocessors themselves, 16 a thread and load, from the host's pinned memory. The link
needs some hundred KB in flight to be full.
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

ENTRIES = 4096
"""Most entries that a program looks at at once."""
SLOTS = 8192
"""Most slots that a program looks at at once; their counts share a 32-bit word, so fewer than 32768."""
MOVERS = 528
"""Programs that move rows, for all sequences: four a multiprocessor, which is 1.4 MB of rows of 2.6 KB in flight."""


@triton.jit
def _ages(p_owner, p_stamp, slot, here, now, AGES: tl.constexpr):
    """Steps since each slot was used, 0: in this step; at most AGES - 1, which empty slots have. And the owners."""
    owner = tl.load(p_owner + slot, mask=here, other=-1)
    stamp = tl.load(p_stamp + slot, mask=here, other=0)
    age = tl.where(owner < 0, AGES - 1, tl.minimum(now - stamp, AGES - 1))
    return tl.where(here, age, 0), owner


STEP = tl.constexpr(AGES // 4)
ROUNDS = tl.constexpr((AGES.bit_length() - 1) // 2)


@triton.jit
def _count_old(age, least, step):
    """How many slots are of age `least` + 1, 2 and 3 steps or more, in 21 bits each of an int64."""
    one = (age >= least + step).to(tl.int64)
    two = (age >= least + 2 * step).to(tl.int64)
    three = (age >= least + 3 * step).to(tl.int64)
    return tl.sum(one | (two << 21) | (three << 42), 0)


@triton.jit
def _narrow(counts, least, step, older, missing):
    """One round of the search for the greatest age that `missing` slots or more have reached, in quarters: that age so
    far, and how many slots are known to be older than that round's quarter."""
    one, two, three = counts & 0x1FFFFF, (counts >> 21) & 0x1FFFFF, counts >> 42
    passed = (one >= missing).to(tl.int32) + (two >= missing).to(tl.int32) + (three >= missing).to(tl.int32)
    above = tl.where(passed == 0, one, tl.where(passed == 1, two, tl.where(passed == 2, three, older)))
    return least + passed * step, above


@triton.jit
def _replace(
    slot, age, owner, cut, rest, now, taken, equal, p_table, p_miss_row, p_miss_slot, p_slot_of, p_owner, p_stamp
):  # fmt: skip
    """Gives the slots that are old enough to the next missing rows; returns how many, and how many of age `cut`."""
    older = (age > cut).to(tl.int32)
    same = (age == cut).to(tl.int32)
    packed = tl.cumsum((older << 16) | same, 0)
    left = rest - equal
    rank = packed & 0xFFFF
    chosen = (older > 0) | ((same > 0) & (rank <= left))
    miss = taken + (packed >> 16) + tl.minimum(rank, left) - 1
    row = tl.load(p_miss_row + miss, mask=chosen, other=0)
    entry = tl.load(p_miss_slot + miss, mask=chosen, other=0)
    tl.store(p_slot_of + owner, -1, mask=chosen & (owner >= 0))
    tl.store(p_owner + slot, row, mask=chosen)
    tl.store(p_slot_of + row, slot, mask=chosen)
    tl.store(p_stamp + slot, now, mask=chosen)
    tl.store(p_table + entry, slot, mask=chosen)
    tl.store(p_miss_slot + miss, slot, mask=chosen)
    last = tl.max(packed, 0)  # of sums that only grow
    more = last & 0xFFFF
    return (last >> 16) + tl.minimum(more, left), more


@triton.jit
def assign(
    p_rows, p_number, p_table, p_miss_row, p_miss_slot, p_missing, p_slot_of, p_owner, p_stamp, p_first, p_clock,
    p_counters, budget, ENTRIES: tl.constexpr, SLOTS: tl.constexpr, SINGLE: tl.constexpr, AGES: tl.constexpr,
):  # fmt: skip
    """The books of one sequence. p_miss_row, p_miss_slot int32 [B, budget], p_missing int32 [B]: what is to be read,
    and where to. SINGLE: no sequence has more than SLOTS slots, which then are looked at once only."""
    i_batch = tl.program_id(0).to(tl.int64)
    p_rows += i_batch * budget
    p_table += i_batch * budget
    p_miss_row += i_batch * budget
    p_miss_slot += i_batch * budget
    number = tl.maximum(tl.minimum(tl.load(p_number + i_batch), budget), 0)
    now = tl.load(p_clock + i_batch) + 1
    first, last = tl.load(p_first + i_batch), tl.load(p_first + i_batch + 1)
    i = tl.arange(0, ENTRIES)
    missing = 0
    for at in range(0, bound(budget), ENTRIES):
        entry = at + i
        wanted = entry < number
        row = tl.load(p_rows + entry, mask=wanted, other=0)
        slot = tl.load(p_slot_of + row, mask=wanted, other=-1)
        found = wanted & (slot >= 0)
        tl.store(p_stamp + slot, now, mask=found)
        tl.store(p_table + entry, tl.where(found, slot, 0), mask=entry < budget)
        absent = (wanted & (slot < 0)).to(tl.int32)
        rank = tl.cumsum(absent, 0)
        to = missing + rank - 1
        tl.store(p_miss_row + to, row, mask=absent > 0)
        tl.store(p_miss_slot + to, entry, mask=absent > 0)  # the entry, until there is a slot
        missing += tl.max(rank, 0)
    tl.store(p_missing + i_batch, missing)
    tl.store(p_clock + i_batch, now)
    p_counters += 2 * i_batch
    tl.store(p_counters, tl.load(p_counters) + number - missing)
    tl.store(p_counters + 1, tl.load(p_counters + 1) + missing)
    if missing > 0:
        tl.debug_barrier()  # other threads read these stamps and misses
        j = tl.arange(0, SLOTS)
        cut = 0
        older = tl.cast(0, tl.int64)
        if SINGLE:
            slot = first + j
            age, owner = _ages(p_owner, p_stamp, slot, slot < last, now, AGES)
            for i_round in tl.static_range(ROUNDS):
                counts = _count_old(age, cut, STEP >> (2 * i_round))
                cut, older = _narrow(counts, cut, STEP >> (2 * i_round), older, missing)
            rest = (missing - older).to(tl.int32)
            _replace(
                slot, age, owner, cut, rest, now, 0, 0, p_table, p_miss_row, p_miss_slot, p_slot_of, p_owner, p_stamp
            )  # fmt: skip
        else:
            for i_round in tl.static_range(ROUNDS):
                counts = tl.cast(0, tl.int64)
                for at in range(bound(first), bound(last), SLOTS):
                    age, _ = _ages(p_owner, p_stamp, at + j, at + j < last, now, AGES)
                    counts += _count_old(age, cut, STEP >> (2 * i_round))
                cut, older = _narrow(counts, cut, STEP >> (2 * i_round), older, missing)
            rest = (missing - older).to(tl.int32)
            taken = 0
            equal = 0
            for at in range(bound(first), bound(last), SLOTS):
                if taken < missing:
                    slot = at + j
                    age, owner = _ages(p_owner, p_stamp, slot, slot < last, now, AGES)
                    more, same = _replace(
                        slot, age, owner, cut, rest, now, taken, equal, p_table, p_miss_row, p_miss_slot, p_slot_of,
                        p_owner, p_stamp,
                    )  # fmt: skip
                    taken += more
                    equal = tl.minimum(equal + same, rest)


@triton.jit
def hold(p_owner, p_first, p_table, p_count, width, SLOTS: tl.constexpr):
    """The slots of one sequence that are in use: p_table int32 [B, width], p_count int32 [B]."""
    i_batch = tl.program_id(0).to(tl.int64)
    p_table += i_batch * width
    first, last = tl.load(p_first + i_batch), tl.load(p_first + i_batch + 1)
    i = tl.arange(0, SLOTS)
    count = 0
    for at in range(bound(first), bound(last), SLOTS):
        slot = at + i
        used = (tl.load(p_owner + slot, mask=slot < last, other=-1) >= 0).to(tl.int32)
        rank = tl.cumsum(used, 0)
        tl.store(p_table + count + rank - 1, slot, mask=used > 0)
        count += tl.max(rank, 0)
    tl.store(p_count + i_batch, count)


@triton.jit
def move(
    p_addresses, p_row, p_place, p_number, p_device, width,
    PER: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr, LIMITED: tl.constexpr,
    TO_HOST: tl.constexpr,
):  # fmt: skip
    """Rows of WORDS 32-bit words, between the host and p_device [places, WORDS]; the programs of a sequence take turns.
    PLACED: p_place says where to, else it is the number of the entry. LIMITED: p_number says how many of a sequence's
    `width` entries there are."""
    i_batch = tl.program_id(1).to(tl.int64)
    number = width
    if LIMITED:
        number = tl.minimum(tl.load(p_number + i_batch), width)
    for entry in range(bound(tl.program_id(0)), bound(number), bound(tl.num_programs(0))):
        i_entry = i_batch * width + entry
        row = tl.load(p_row + i_entry)
        place = i_entry
        if PLACED:
            place = tl.load(p_place + i_entry).to(tl.int64)
        p_host = tl.load(p_addresses + row // PER).to(tl.pointer_type(tl.int32))
        p_host = tl.multiple_of(p_host, 16) + (row % PER).to(tl.int64) * WORDS
        p_line = p_device + place * WORDS
        for at in tl.static_range(0, WORDS, BLOCK):
            word = at + tl.arange(0, BLOCK)
            if TO_HOST:
                tl.store(p_host + word, tl.load(p_line + word, mask=word < WORDS), mask=word < WORDS)
            else:
                tl.store(p_line + word, tl.load(p_host + word, mask=word < WORDS), mask=word < WORDS)


def _move(
    source: HostRows, rows: Tensor, number: Tensor | None, place: Tensor | None, device: Tensor, to_host: bool
) -> None:
    """rows [B, width]; device uint8 [places, row_bytes]."""
    batch, width = rows.shape
    words = source.row_bytes // 4
    block = min(2048, triton.next_power_of_2(words))
    options = {} if INTERPRET else {"num_warps": max(1, min(4, block // 128))}
    move[(min(width, max(1, MOVERS // batch)), batch)](
        source.addresses, rows, rows if place is None else place, rows if number is None else number,
        device.view(torch.int32), width, source.per_segment, words, block, place is not None, number is not None,
        to_host, **options,
    )  # fmt: skip


def _tile(most: int, limit: int) -> int:
    return min(limit, max(128, triton.next_power_of_2(most)))


def fetch_rows(hot: HotBuffer, source: HostRows, rows: Tensor, number: Tensor) -> Tensor:
    """See :func:`hisparse.ops.fetch.fetch_rows`."""
    batch, budget = rows.shape
    table = torch.empty_like(rows)
    if not batch or not budget:
        return table
    rows = rows.contiguous()
    miss_row, miss_slot = torch.empty(2, batch, budget, dtype=torch.int32, device=rows.device)
    missing = torch.empty(batch, dtype=torch.int32, device=rows.device)
    entries, slots = _tile(budget, ENTRIES), _tile(max(hot.sizes), SLOTS)
    # More warps would issue more in all: each of them sums over all.
    options = {} if INTERPRET else {"num_warps": 8 if slots > 1024 else 4}
    assign[(batch,)](
        rows, number, table, miss_row, miss_slot, missing, hot.slot_of, hot.owner, hot.stamp, hot.first, hot.clock,
        hot.counters, budget, entries, slots, max(hot.sizes) <= slots, AGES, **options,
    )  # fmt: skip
    _move(source, miss_row, missing, miss_slot, hot.buffer, False)
    return table


def held_rows(hot: HotBuffer, width: int) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.ops.fetch.held_rows`."""
    batch = len(hot.sizes)
    table = torch.empty(batch, width, dtype=torch.int32, device=hot.owner.device)
    count = torch.empty(batch, dtype=torch.int32, device=hot.owner.device)
    slots = _tile(max(hot.sizes), SLOTS)
    options = {} if INTERPRET else {"num_warps": 8 if slots > 1024 else 4}
    hold[(batch,)](hot.owner, hot.first, table, count, width, slots, **options)
    return table, count


def gather_rows(source: HostRows, rows: Tensor, number: Tensor | None) -> Tensor:
    """See :func:`hisparse.ops.fetch.gather_rows`."""
    out = torch.empty(rows.numel(), source.row_bytes, dtype=torch.uint8, device=rows.device)
    _move(source, rows.contiguous(), number, None, out, False)
    return out


def store_rows(source: HostRows, rows: Tensor, pages: Tensor) -> None:
    """See :func:`hisparse.ops.fetch.store_rows`."""
    _move(source, rows.contiguous()[None], None, None, pages.contiguous(), True)


forget_rows = reference.forget_rows
