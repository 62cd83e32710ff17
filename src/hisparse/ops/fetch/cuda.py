"""Rows from the host in CUDA C++: see ``fetch.cu``. One launch, which starts while the kernel ahead ends.

Steps of more than MOST_ENTRIES entries and buffers of more than MOST_SLOTS slots go to the Triton twin, as does all
that is not `fetch_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops._cuda import load_kernel
from hisparse.ops.fetch import reference, triton
from hisparse.ops.fetch.types import AGES, HostRows, HotBuffer

CLUSTER = 8
"""Programs of a sequence; of more than MANY sequences with a buffer each it is half as many."""
MANY = 8
LEAST, THREADS = 256, 1024
"""Fewest and most threads of a program."""
EACH_ENTRY, EACH_SLOT = 8, 16
"""Most entries and slots of a thread."""
MOST_ENTRIES, MOST_SLOTS = CLUSTER * THREADS * EACH_ENTRY, CLUSTER * THREADS * EACH_SLOT
"""Of a sequence; or of all that share a buffer."""
PIECE = 184
"""Most vectors of 16 bytes of a row that a warp brings at once: a lane has six, and they may begin within a line."""
MOST_HELD = 8 * THREADS
"""Most slots of a sequence that `held_rows` lists in one launch."""

gather_rows = triton.gather_rows
store_rows = triton.store_rows
forget_rows = triton.forget_rows


def programs(sequences: int) -> int:
    """How many programs `fetch_rows` has for so many sequences with a buffer each, all of them small."""
    return sequences * (CLUSTER if sequences <= MANY else CLUSTER // 2)


def fits(entries: int, slots: int) -> bool:
    """Whether a sequence, or all that share a buffer, may have so many entries and slots."""
    return 0 < entries <= MOST_ENTRIES and 0 < slots <= MOST_SLOTS


def fetch_rows(hot: HotBuffer, source: HostRows, rows: Tensor, number: Tensor, early: bool = False) -> Tensor:
    """See :func:`hisparse.ops.fetch.fetch_rows`.

    With `early` the kernel reads the clock while the scan whose choice it fetches may still run. That is older: the
    scan's first kernel lets the next one start only after it has itself waited for what was launched before it.
    """
    batch, budget = rows.shape
    if not batch or not fits(budget, max(hot.sizes)):
        result: Tensor = triton.fetch_rows(hot, source, rows, number)
        return result
    cluster = programs(batch) // batch
    if not budget * CLUSTER <= MOST_ENTRIES * cluster or not max(hot.sizes) * CLUSTER <= MOST_SLOTS * cluster:
        cluster = CLUSTER
    return _fetch(hot, source, rows, number, None, early, cluster)


def fetch_shared(
    hot: HotBuffer, source: HostRows, rows: Tensor, number: Tensor, shared: Tensor, early: bool = False
) -> Tensor:
    """As `fetch_rows`, for sequences that share the buffer of one (`hot.sizes` has one size) and may share rows.

    rows: int32 [B, budget], each once in its sequence. A row that several want is found or read once; the missing ones
    get their slots in the order of the first entries that want them. shared: int64 [2], to which are added the
    sequences that want something, less one, and the entries whose row an earlier entry had asked for. There must be
    slots for all rows of the step; rows without one are not brought, and have slot 0. `fits` must hold.
    """
    return _fetch(hot, source, rows, number, shared, early, CLUSTER)


def _fetch(
    hot: HotBuffer, source: HostRows, rows: Tensor, number: Tensor, shared: Tensor | None, early: bool, cluster: int
) -> Tensor:
    batch, width = rows.shape
    merge = shared is not None
    entries, slots = -(-(rows.numel() if merge else width) // cluster), -(-max(hot.sizes) // cluster)  # of a program
    threads = max(LEAST, min(THREADS, -(-max(entries, slots // 2) // 64) * 64))
    vectors = source.row_bytes // 16
    defines = {
        "CLUSTER": cluster,
        "THREADS": threads,
        "EACH_ENTRY": -(-entries // threads),
        "EACH_SLOT": -(-slots // threads),
        "AGES": AGES,
        "VECTORS": vectors,
        "PIECES": -(-vectors // PIECE),
        "DEPTH": 2 if threads <= THREADS // 2 else 1,  # as registers allow
        "PER_SEGMENT": source.per_segment,
        "MERGE": int(merge),
    }
    early = early and rows.is_contiguous() and number.is_contiguous()  # a copy would be the kernel ahead
    rows, number = rows.contiguous(), number.contiguous()
    table = torch.empty_like(rows)
    kernel = load_kernel("fetch/fetch.cu", "fetch_rows", defines, device=rows.device).prefer_shared()
    books = (hot.slot_of, hot.owner, hot.stamp, hot.first, hot.clock, hot.counters)
    kernel(
        (cluster, 1 if merge else batch, 1),
        threads,
        [rows, number, table, *books, shared, source.addresses, hot.buffer, batch, width, early],
        shared=8 * threads * defines["EACH_ENTRY"],
        overlap=True,
    )
    return table


def held_rows(hot: HotBuffer, width: int) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.ops.fetch.held_rows`."""
    batch = len(hot.sizes)
    if not batch or not 0 < max(hot.sizes) <= MOST_HELD:
        return reference.held_rows(hot, width)
    slots = torch.empty(batch, width, dtype=torch.int32, device=hot.owner.device)
    number = torch.empty(batch, dtype=torch.int32, device=hot.owner.device)
    defines = {"THREADS": THREADS, "EACH_SLOT": -(-max(hot.sizes) // THREADS)}
    kernel = load_kernel("fetch/held.cu", "list_held", defines, device=hot.owner.device).prefer_shared()
    kernel((batch, 1, 1), THREADS, [hot.owner, hot.first, slots, number, width], overlap=True)
    return slots, number
