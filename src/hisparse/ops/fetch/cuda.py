"""Rows from the host in CUDA C++: see ``fetch.cu``. One launch, which starts while the kernel ahead ends.

Buffers of more than 8192 slots and steps of more than 4096 rows a sequence go to the Triton twin, as does all that is
not `fetch_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops._cuda import load_kernel
from hisparse.ops.fetch import reference, triton
from hisparse.ops.fetch.types import AGES, HostRows, HotBuffer

THREADS = 1024
"""Most threads that keep the books of a sequence."""
MOST_ENTRIES, MOST_SLOTS = 4 * THREADS, 8 * THREADS
CLUSTER = 4
"""Programs a sequence: one keeps the books, each warp of the others brings a row."""

gather_rows = triton.gather_rows
store_rows = triton.store_rows
forget_rows = triton.forget_rows


def _defines(threads: int, budget: int, hot: HotBuffer, per_segment: int) -> dict[str, int]:
    return {
        "THREADS": threads,
        "EACH_ENTRY": -(-budget // threads),
        "EACH_SLOT": -(-max(hot.sizes) // threads),
        "AGES": AGES,
        "VECTORS": hot.buffer.shape[1] // 16,
        "PER_SEGMENT": per_segment,
    }


def fetch_rows(hot: HotBuffer, source: HostRows, rows: Tensor, number: Tensor, early: bool = False) -> Tensor:
    """See :func:`hisparse.ops.fetch.fetch_rows`.

    With `early` the kernel reads the books while the scan whose choice it fetches may still run. They are older: the
    scan's first kernel lets the next one start only after it has itself waited for what was launched before it.
    """
    batch, budget = rows.shape
    if not batch or not 0 < budget <= MOST_ENTRIES or not 0 < max(hot.sizes) <= MOST_SLOTS:
        result: Tensor = triton.fetch_rows(hot, source, rows, number)
        return result
    threads = max(256, min(THREADS, -(-budget // 64) * 32))
    defines = _defines(threads, budget, hot, source.per_segment)
    early = early and rows.is_contiguous() and number.is_contiguous()  # a copy would be the kernel ahead
    rows, number = rows.contiguous(), number.contiguous()
    table = torch.empty_like(rows)
    kernel = load_kernel("fetch/fetch.cu", "fetch_rows", defines, device=rows.device).prefer_shared()
    books = (hot.slot_of, hot.owner, hot.stamp, hot.first, hot.clock, hot.counters)
    kernel(
        (CLUSTER, batch, 1),
        threads,
        [rows, number, table, *books, source.addresses, hot.buffer, len(source.segments), budget, early],
        overlap=True,
    )
    return table


def held_rows(hot: HotBuffer, width: int) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.ops.fetch.held_rows`."""
    batch = len(hot.sizes)
    if not batch or not 0 < max(hot.sizes) <= MOST_SLOTS:
        return reference.held_rows(hot, width)
    slots = torch.empty(batch, width, dtype=torch.int32, device=hot.owner.device)
    number = torch.empty(batch, dtype=torch.int32, device=hot.owner.device)
    defines = _defines(THREADS, 1, hot, 1)
    kernel = load_kernel("fetch/fetch.cu", "list_held", defines, device=hot.owner.device).prefer_shared()
    kernel((batch, 1, 1), THREADS, [hot.owner, hot.first, slots, number, width], overlap=True)
    return slots, number
