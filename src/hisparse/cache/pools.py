"""Page ids shared by all layers, and the byte tensors that the ids index."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import HiSparseError
from hisparse.ops.fetch import HostRows, gather_rows, store_rows

SEGMENT_BYTES = 1 << 22
"""Bytes of a segment of host rows: the pinned allocator hands out powers of two, and a copy of 4 MiB fills the link."""


class PageIds:
    """Hands out page ids; one instance serves every layer, so a page table is valid in all of them.

    Released ids are reused before new ones are made. `capacity` is how many rows a pool must have: it grows in steps of
    1/128 of what is there (at least `step` pages), because the spare rows of every layer count against the capacity.
    """

    def __init__(self, step: int = 4) -> None:
        self.step = step
        self.made = 0
        self.capacity = 0
        self._free: list[int] = []

    @property
    def in_use(self) -> int:
        return self.made - len(self._free)

    def slack(self, pages: int) -> int:
        """Spare rows that a pool of `pages` pages may hold."""
        return max(self.step, math.ceil(pages / 128))

    def take(self, count: int) -> list[int]:
        """`count` ids that nobody else holds."""
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = range(self.made, self.made + count - len(reused))
        self.made += len(fresh)
        if self.made > self.capacity:
            first = self.capacity == 0
            self.capacity = self.made if first else max(self.made, self.capacity + self.slack(self.capacity))
        return reused + list(fresh)

    def release(self, ids: list[int]) -> None:
        """Give ids back. Raises HiSparseError, and takes none, where one is not in use: it would have two owners."""
        free = set(self._free)
        for page in ids:
            if not 0 <= page < self.made or page in free:
                raise HiSparseError(f"page {page} is not in use ({self.made} made, {len(self._free)} free)")
            free.add(page)
        self._free += ids


class Pool:
    """uint8 [capacity, page_bytes], grown on demand; row i holds page i of this layer.

    Parameters
    ----------
    page_bytes: bytes of one page.
    device: where the rows live.
    """

    def __init__(self, page_bytes: int, device: torch.device) -> None:
        self.page_bytes = page_bytes
        self.data = torch.empty((0, page_bytes), dtype=torch.uint8, device=device)

    def __len__(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def ensure(self, capacity: int) -> None:
        """Grow to at least `capacity` rows; what is stored keeps its place."""
        if capacity <= self.data.shape[0]:
            return
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
            grown = torch.empty((capacity, self.page_bytes), dtype=torch.uint8, device=self.data.device)
        grown[: self.data.shape[0]] = self.data
        self.data = grown

    def write(self, ids: Tensor, pages: Tensor) -> None:
        """Store `pages` uint8 [n, page_bytes] under `ids` int64 [n] (any device)."""
        ids, pages = ids.to(self.data.device), pages.to(self.data.device)
        if self.data.is_cuda and self.page_bytes % 8 == 0:  # a byte a thread would take eight times as long
            self.data.view(torch.int64).index_copy_(0, ids, pages.view(torch.int64))
        else:
            self.data.index_copy_(0, ids, pages)

    def read(self, ids: Tensor, device: torch.device) -> Tensor:
        """Rows `ids` int64 [n] as uint8 [n, page_bytes] on `device`."""
        rows = self.data.index_select(0, ids.to(self.data.device))
        return rows if rows.device == device else rows.to(device, non_blocking=True)


class HostPool:
    """Rows of one layer in the host's memory, in segments of equal size: growing adds one and copies nothing.

    Pinning and copying hundreds of MiB again for every growth would take longer than the prefill that fills them. Where
    the rows are used on a CUDA device the segments are pinned: kernels read and write them in place, in stream order,
    and the host only after it has waited for the device (`read` and `write` are such kernels). A segment must not be
    freed while a kernel still uses it; the pinned allocator gives its memory to pools only, whose kernels follow.

    Parameters
    ----------
    page_bytes: bytes of a row, a multiple of 16. device: where rows are wanted.
    """

    def __init__(self, page_bytes: int, device: torch.device) -> None:
        self.page_bytes, self.device = page_bytes, device
        self.per_segment = max(1, SEGMENT_BYTES // page_bytes)
        self._segments: list[Tensor] = []
        self._source: HostRows | None = None

    def __len__(self) -> int:
        return len(self._segments) * self.per_segment

    @property
    def nbytes(self) -> int:
        return len(self) * self.page_bytes

    @property
    def source(self) -> HostRows:
        """All segments, as the fetch operations take them. Valid until the pool grows. At least one segment must be
        there."""
        if self._source is None:
            self._source = HostRows.of(self._segments, self.device)
        return self._source

    def ensure(self, capacity: int) -> None:
        """Grow to at least `capacity` rows."""
        while len(self) < capacity:
            with torch.inference_mode(False):
                shape = (self.per_segment, self.page_bytes)
                self._segments.append(torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
            self._source = None

    def write(self, ids: Tensor, pages: Tensor) -> None:
        """Store `pages` uint8 [n, page_bytes] under `ids` int64 [n], both on the device."""
        if len(ids):
            store_rows(self.source, ids.int(), pages)

    def read(self, ids: Tensor, device: torch.device) -> Tensor:
        """Rows `ids` int64 [n], on the pool's device, as uint8 [n, page_bytes] on `device`."""
        if not len(ids):
            return torch.empty((0, self.page_bytes), dtype=torch.uint8, device=device)
        return gather_rows(self.source, ids.int()[None]).to(device)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: addresses are not copied, and the device must have written all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {**self.__dict__, "_source": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.device.type == "cuda":  # a copy of pinned memory is not pinned
            self._segments = [segment.pin_memory() for segment in self._segments]
