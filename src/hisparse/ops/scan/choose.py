"""Kernels that choose the rows of most worth.

Worth is not negative, so its bits order as it does. All multiprocessors count the rows by bins of 2**-8 of an octave,
BINS of them below a limit (see :mod:`.bins`). Which bin the budget runs out in then says for nearly every row whether
it is chosen; the few rows of that bin are left to one program a sequence, which finds the exact limit by bisection, and
among equals one of the row number: so the choice is the same each time although the order is not.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from hisparse.ops.scan.kernels import bound, count_bins, find_bin


@triton.jit(do_not_specialize=["n_rows_max", "base"])
def count_first(p_worth, p_count, p_histogram, n_rows_max, base, ROWS: tl.constexpr, TILES: tl.constexpr,
                BINS: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """p_histogram int32 [B, BINS + 2], cleared before: how many rows each bin has."""
    i_batch = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(p_count + i_batch), n_rows_max)
    counts = tl.zeros((BINS,), tl.int32)
    for i_tile in range(TILES):
        i_row = (tl.program_id(0) * TILES + i_tile) * ROWS + tl.arange(0, ROWS)
        m_row = i_row < count
        worth = tl.load(p_worth + i_batch * n_rows_max + i_row, mask=m_row, other=0.0)
        counts += count_bins(worth, m_row, base, ROWS, BINS, SHIFT)
    bins = tl.arange(0, BINS)
    tl.atomic_add(p_histogram + i_batch * (BINS + 2) + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _cut(counts, wanted):
    """Of `counts`: the bin at which `wanted`, counted from the top, is reached; -1 where it never is."""
    total = tl.sum(counts, 0)
    above = total - tl.cumsum(counts, 0)  # rows in higher bins: fewer from bin to bin
    return tl.where(total < wanted, -1, tl.sum((above >= wanted).to(tl.int32), 0))


@triton.jit(do_not_specialize=["n_rows_max", "budget", "base"], do_not_specialize_on_alignment=["p_row"])
def take_first(
    p_worth, p_table, p_count, p_wanted, p_histogram, p_rows, p_key, p_row, n_rows_max, budget, base,
    ROWS: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Writes the rows of higher bins to p_rows int32 [B, budget], and those of the bin at the cut as candidates to
    p_key and p_row int32 [B, max_rows]. The last two entries of the histogram count both."""
    i_batch = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(p_count + i_batch), n_rows_max)
    if tl.program_id(0) * ROWS < count:
        wanted = budget
        if LIMITED:
            wanted = tl.minimum(tl.load(p_wanted + i_batch), budget)
        p_histogram += i_batch * (BINS + 2)
        cut = _cut(tl.load(p_histogram + tl.arange(0, BINS)), wanted)
        i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        m_row = i_row < count
        worth = tl.load(p_worth + i_batch * n_rows_max + i_row, mask=m_row, other=0.0)
        key = worth.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        place = tl.where(m_row, find_bin(key, base, BINS, SHIFT), -2)
        taken = (place > cut).to(tl.int32)
        order = tl.cumsum(taken, 0)
        n_taken = tl.sum(taken, 0)
        if n_taken > 0:
            at = tl.atomic_add(p_histogram + BINS, n_taken, sem="relaxed") + order - 1
            row = tl.load(p_table + i_batch * n_rows_max + i_row, mask=taken > 0, other=0)
            tl.store(p_rows + i_batch * budget + at, row, mask=(taken > 0) & (at < budget))
        left = (place == cut).to(tl.int32)
        order = tl.cumsum(left, 0)
        n_left = tl.sum(left, 0)
        if n_left > 0:
            to = i_batch * n_rows_max + tl.atomic_add(p_histogram + BINS + 1, n_left, sem="relaxed") + order - 1
            tl.store(p_key + to, key, mask=left > 0)
            tl.store(p_row + to, i_row, mask=left > 0)


@triton.jit
def _count_from(p_key, n, limit, BLOCK: tl.constexpr):
    """How many of the n keys are `limit` or more."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, bound(n), BLOCK):
        total += (tl.load(p_key + at + i, mask=at + i < n, other=-1) >= limit).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _count_equal(p_key, p_row, n, key, last, BLOCK: tl.constexpr):
    """How many of the n keys are `key`, in rows up to `last`."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, bound(n), BLOCK):
        equal = tl.load(p_key + at + i, mask=at + i < n, other=-1) == key
        total += (equal & (tl.load(p_row + at + i, mask=at + i < n, other=0) <= last)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["n_rows_max", "budget"], do_not_specialize_on_alignment=["p_row"])
def take_rest(
    p_table, p_count, p_wanted, p_histogram, p_rows, p_chosen, p_key, p_row, n_rows_max, budget,
    BLOCK: tl.constexpr, BINS: tl.constexpr, ROW_BITS: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Chooses among the candidates of one sequence, fills the rest of p_rows with zeros and writes the number
    chosen."""
    i_batch = tl.program_id(0).to(tl.int64)
    wanted = budget
    if LIMITED:
        wanted = tl.maximum(tl.minimum(tl.load(p_wanted + i_batch), budget), 0)
    wanted = tl.minimum(wanted, tl.minimum(tl.load(p_count + i_batch), n_rows_max))
    n_taken = tl.minimum(tl.load(p_histogram + i_batch * (BINS + 2) + BINS), wanted)
    n_left = tl.load(p_histogram + i_batch * (BINS + 2) + BINS + 1)
    p_key += i_batch * n_rows_max
    p_row += i_batch * n_rows_max
    p_rows += i_batch * budget
    p_table += i_batch * n_rows_max
    rest = wanted - n_taken
    # The largest key that `rest` candidates reach, bit by bit.
    limit = 0
    for bit in range(31):
        trial = limit | (1 << (30 - bit))
        limit = tl.where(_count_from(p_key, n_left, trial, BLOCK) >= rest, trial, limit)
    # Of those that equal it, the ones in the first rows: the smallest last row that makes up the number.
    more = rest - _count_from(p_key, n_left, limit + 1, BLOCK)
    last = (1 << ROW_BITS) - 1
    if _count_equal(p_key, p_row, n_left, limit, last, BLOCK) > more:
        first = 0  # the bits of `last` that are needed: those without which there are too few
        for bit in range(ROW_BITS):
            trial = first | ((1 << (ROW_BITS - 1 - bit)) - 1)
            enough = _count_equal(p_key, p_row, n_left, limit, trial, BLOCK) >= more
            first = tl.where(enough, first, first | (1 << (ROW_BITS - 1 - bit)))
        last = first
    i = tl.arange(0, BLOCK)
    base = n_taken
    if rest > 0:
        for at in range(0, bound(n_left), BLOCK):
            inside = at + i < n_left
            key = tl.load(p_key + at + i, mask=inside, other=-1)
            row = tl.load(p_row + at + i, mask=inside, other=0)
            chosen = inside & ((key > limit) | ((key == limit) & (row <= last)))
            number = chosen.to(tl.int32)
            to = base + tl.cumsum(number, 0) - 1
            tl.store(p_rows + to, tl.load(p_table + row, mask=chosen, other=0), mask=chosen & (to < wanted))
            base += tl.sum(number, 0)
    for at in range(0, bound(budget), BLOCK):
        empty = (at + i >= wanted) & (at + i < budget)
        tl.store(p_rows + at + i, tl.zeros((BLOCK,), tl.int32), mask=empty)
    tl.store(p_chosen + i_batch, wanted)
