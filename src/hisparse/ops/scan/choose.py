"""Kernels that choose the rows of most worth: a radix selection whose first digit is counted by all multiprocessors.

Worth is not negative, so its bits order as it does. The first digit (sign, exponent and three bits of the mantissa) says for
nearly every row whether it is chosen; the rows whose digit is the one at which the budget runs out, a few per cent of what
is chosen and more, are left to one program a sequence, which goes on digit by digit, and at last by row number: so the choice is
the same each time although the order is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hisparse.ops.scan.kernels import bound

BINS = 2048
SHIFT = 20  # 31 bits without the sign: 11, then 10, then 10
DIGIT = 1024


@triton.jit
def count_first(p_worth, p_count, p_histogram, n_rows_max, ROWS: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr):
    """p_histogram int32 [B, BINS + 2], cleared before: how many rows have which first digit."""
    i_batch = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(p_count + i_batch), n_rows_max)
    if tl.program_id(0) * ROWS < count:
        i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        m_row = i_row < count
        worth = tl.load(p_worth + i_batch * n_rows_max + i_row, mask=m_row, other=0.0)
        bucket = (worth.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> SHIFT
        counts = tl.histogram(bucket, BINS)
        bins = tl.arange(0, BINS)
        counts = tl.where(bins == 0, counts - (ROWS - tl.sum(m_row.to(tl.int32), 0)), counts)
        tl.atomic_add(p_histogram + i_batch * (BINS + 2) + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _cut(counts, wanted, SIZE: tl.constexpr):
    """Of `counts` [SIZE]: the digit at which `wanted`, counted from the top, is reached (-1: never), and the count above it."""
    upto = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    above = total - upto  # rows with a larger digit
    digit = tl.sum((above >= wanted).to(tl.int32), 0)  # `above` falls with the digit
    digit = tl.where(total < wanted, -1, digit)
    i = tl.arange(0, SIZE)
    return digit, tl.sum(tl.where(i == digit, above, 0), 0)


@triton.jit
def take_first(
    p_worth, p_table, p_count, p_wanted, p_histogram, p_rows, p_key, p_row, n_rows_max, budget,
    ROWS: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Writes the rows of a larger first digit to p_rows int32 [B, budget], and those at the cut as candidates to p_key and
    p_row int32 [B, max_rows]. The last two entries of the histogram count both."""
    i_batch = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(p_count + i_batch), n_rows_max)
    if tl.program_id(0) * ROWS < count:
        wanted = budget
        if LIMITED:
            wanted = tl.minimum(tl.load(p_wanted + i_batch), budget)
        p_histogram += i_batch * (BINS + 2)
        bins = tl.arange(0, BINS)
        digit, _ = _cut(tl.load(p_histogram + bins), wanted, BINS)
        i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        m_row = i_row < count
        worth = tl.load(p_worth + i_batch * n_rows_max + i_row, mask=m_row, other=0.0)
        key = worth.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bucket = tl.where(m_row, key >> SHIFT, -2)
        taken = (bucket > digit).to(tl.int32)
        place = tl.cumsum(taken, 0)
        n_taken = tl.sum(taken, 0)
        if n_taken > 0:
            base = tl.atomic_add(p_histogram + BINS, n_taken, sem="relaxed")
            row = tl.load(p_table + i_batch * n_rows_max + i_row, mask=taken > 0, other=0)
            at = base + place - 1
            tl.store(p_rows + i_batch * budget + at, row, mask=(taken > 0) & (at < budget))
        left = (bucket == digit).to(tl.int32)
        place = tl.cumsum(left, 0)
        n_left = tl.sum(left, 0)
        if n_left > 0:
            at = i_batch * n_rows_max + tl.atomic_add(p_histogram + BINS + 1, n_left, sem="relaxed") + place - 1
            tl.store(p_key + at, key, mask=left > 0)
            tl.store(p_row + at, i_row, mask=left > 0)


@triton.jit
def _tail_digit(key, row, LEVEL: tl.constexpr, LEVELS: tl.constexpr, DIGIT: tl.constexpr):
    """Digit LEVEL of a candidate: two of the key's lower twenty bits, then of the row number, smaller ones first."""
    if LEVEL < 2:
        return (key >> (10 * (1 - LEVEL))) & (DIGIT - 1)
    return DIGIT - 1 - ((row >> (10 * (LEVELS - 1 - LEVEL))) & (DIGIT - 1))


@triton.jit
def take_rest(
    p_table, p_count, p_wanted, p_histogram, p_rows, p_chosen, p_key, p_row, n_rows_max, budget,
    BLOCK: tl.constexpr, BINS: tl.constexpr, DIGIT: tl.constexpr, LEVELS: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Chooses among the candidates of one sequence, fills the rest of p_rows with zeros and writes the number chosen.

    Digit by digit, the cut is found among the candidates whose digits so far are all equal to the cuts.
    """
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
    i = tl.arange(0, BLOCK)
    rest = wanted - n_taken
    cut = ()
    for level in tl.static_range(LEVELS):
        counts = tl.zeros((DIGIT,), tl.int32)
        for at in range(0, bound(n_left), BLOCK):
            inside = at + i < n_left
            key = tl.load(p_key + at + i, mask=inside, other=0)
            row = tl.load(p_row + at + i, mask=inside, other=0)
            for before in tl.static_range(level):
                inside &= _tail_digit(key, row, before, LEVELS, DIGIT) == cut[before]
            digit = _tail_digit(key, row, level, LEVELS, DIGIT)
            found = tl.histogram(tl.where(inside, digit, 0), DIGIT)
            outside = BLOCK - tl.sum(inside.to(tl.int32), 0)
            counts += tl.where(tl.arange(0, DIGIT) == 0, found - outside, found)
        limit, above = _cut(counts, rest, DIGIT)
        rest -= above
        cut = cut + (limit,)
    base = n_taken
    for at in range(0, bound(n_left), BLOCK):
        inside = at + i < n_left
        key = tl.load(p_key + at + i, mask=inside, other=0)
        row = tl.load(p_row + at + i, mask=inside, other=0)
        equal = inside
        chosen = i < 0
        for level in tl.static_range(LEVELS):
            digit = _tail_digit(key, row, level, LEVELS, DIGIT)
            chosen |= equal & (digit > cut[level])
            equal &= digit == cut[level]
        chosen |= equal
        number = chosen.to(tl.int32)
        to = base + tl.cumsum(number, 0) - 1
        tl.store(p_rows + to, tl.load(p_table + row, mask=chosen, other=0), mask=chosen & (to < wanted))
        base += tl.sum(number, 0)
    for at in range(0, bound(budget), BLOCK):
        empty = (at + i >= wanted) & (at + i < budget)
        tl.store(p_rows + at + i, tl.zeros((BLOCK,), tl.int32), mask=empty)
    tl.store(p_chosen + i_batch, wanted)
