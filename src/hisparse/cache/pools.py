"""Page ids shared by all layers, and the byte tensors that the ids index."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hisparse.errors import HiSparseError


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
    device: where the rows live. Rows on the host are pinned when `pin` is set, so that a GPU can read them in place.
    """

    def __init__(self, page_bytes: int, device: torch.device, pin: bool = False) -> None:
        self.page_bytes = page_bytes
        self.pin = pin
        self.data = torch.empty((0, page_bytes), dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def ensure(self, capacity: int) -> None:
        """Grow to at least `capacity` rows; what is stored keeps its place."""
        if capacity <= self.data.shape[0]:
            return
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
            grown = torch.empty(
                (capacity, self.page_bytes), dtype=torch.uint8, device=self.data.device, pin_memory=self.pin
            )
        grown[: self.data.shape[0]] = self.data
        self.data = grown

    def write(self, ids: Tensor, pages: Tensor) -> None:
        """Store `pages` uint8 [n, page_bytes] under `ids` int64 [n] (any device)."""
        self.data.index_copy_(0, ids.to(self.data.device), pages.to(self.data.device))

    def read(self, ids: Tensor, device: torch.device) -> Tensor:
        """Rows `ids` int64 [n] as uint8 [n, page_bytes] on `device`."""
        rows = self.data.index_select(0, ids.to(self.data.device))
        return rows if rows.device == device else rows.to(device, non_blocking=True)
