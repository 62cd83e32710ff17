"""Rows from the host in CUDA C++: see ``fetch.cu``. Two launches, the second of which starts while the first ends.

Buffers of more than 8192 slots and steps of more than 4096 rows a sequence go to the Triton twin, as does all that is
not `fetch_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops._cuda import load_kernel
from hisparse.ops.fetch import triton
from hisparse.ops.fetch.types import AGES, HostRows, HotBuffer

THREADS = 1024
"""Most threads that keep the books of a sequence."""
MOST_ENTRIES, MOST_SLOTS = 4 * THREADS, 8 * THREADS
MOVERS, MOVER_THREADS = 264, 128
"""Programs that move rows, for all sequences: two a multiprocessor, of four warps with a row each."""

gather_rows = triton.gather_rows
store_rows = triton.store_rows
forget_rows = triton.forget_rows
held_rows = triton.held_rows


def fetch_rows(hot: HotBuffer, source: HostRows, rows: Tensor, number: Tensor) -> Tensor:
    """See :func:`hisparse.ops.fetch.fetch_rows`."""
    batch, budget = rows.shape
    if not batch or not 0 < budget <= MOST_ENTRIES or not 0 < max(hot.sizes) <= MOST_SLOTS:
        result: Tensor = triton.fetch_rows(hot, source, rows, number)
        return result
    threads = max(128, min(THREADS, -(-budget // 64) * 32))
    defines = {
        "THREADS": threads,
        "EACH_ENTRY": -(-budget // threads),
        "EACH_SLOT": -(-max(hot.sizes) // threads),
        "AGES": AGES,
        "VECTORS": source.row_bytes // 16,
        "PER_SEGMENT": source.per_segment,
    }
    rows, number = rows.contiguous(), number.contiguous()
    table = torch.empty_like(rows)
    miss_row, miss_slot = torch.empty(2, batch, budget, dtype=torch.int32, device=rows.device)
    missing = torch.empty(batch, dtype=torch.int32, device=rows.device)
    assign = load_kernel("fetch/fetch.cu", "assign", defines, device=rows.device)
    move = load_kernel("fetch/fetch.cu", "move_rows", defines, device=rows.device)
    books = (hot.slot_of, hot.owner, hot.stamp, hot.first, hot.clock, hot.counters)
    assign((batch, 1, 1), threads, [rows, number, table, miss_row, miss_slot, missing, *books, budget], overlap=True)
    move(
        (max(1, MOVERS // batch), batch, 1),
        MOVER_THREADS,
        [source.addresses, miss_row, miss_slot, missing, hot.buffer, budget],
        overlap=True,
    )
    return table
