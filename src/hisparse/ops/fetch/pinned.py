"""Large page-locked memory that a GPU reads and writes in place.

PyTorch's pinned allocator rounds a size up to a power of two and touches memory with one thread: of a pool that is to
take most of the host's memory up to half would be wasted, and a hundred gigabytes take a minute.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from hisparse.errors import InputError

SLICE = 256 << 20
"""Bytes that a thread touches at a time."""
_PORTABLE_AND_MAPPED = 3


def pinned_rows(rows: int, row_bytes: int) -> Tensor:
    """uint8 [rows, row_bytes], zero, page-locked for all CUDA contexts of this process until the tensor is gone.

    Pages are large where the system gives large ones, and touched by many threads. Raises InputError where the system
    refuses so much memory.
    """
    size = rows * row_bytes
    if not size:
        return torch.zeros(rows, row_bytes, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, size)
    except OSError as error:
        amount = f"{size / 2**30:.1f} GiB of host memory for rows"
        raise InputError(f"{amount}: {error}; let fewer rows be set aside") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    address = flat.data_ptr()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(threads.map(lambda at: ctypes.memset(address + at, 0, min(SLICE, size - at)), range(0, size, SLICE)))
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cuda.cudaHostRegister(address, size, _PORTABLE_AND_MAPPED))
    if code:
        amount = f"{size / 2**30:.1f} GiB of host memory could not be page-locked (CUDA error {code})"
        raise InputError(f"{amount}; let fewer rows be set aside, or raise the limit of locked memory (ulimit -l)")
    weakref.finalize(memory, _release, cuda, address).atexit = False
    return flat.view(rows, row_bytes)


def _release(cuda: object, address: int) -> None:
    with suppress(Exception):  # the driver may be gone
        cuda.cudaHostUnregister(address)  # type: ignore[attr-defined]
