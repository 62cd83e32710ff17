"""Rows on the host, and the device buffer in front of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AGES = 64
"""Steps by which the last use of two slots is told apart, a power of four; slots unused for longer are alike."""


@dataclass(frozen=True)
class HostRows:
    """Packed rows in the host's memory, in segments of equal size: row r is line ``r % per_segment`` of segment ``r //
    per_segment``.

    segments: uint8 [per_segment, row_bytes], row_bytes a multiple of 16; pinned where a GPU reads them. addresses:
    int64 [segments], where each begins, on the device that reads: a GPU reads pinned memory under the host's address.
    """

    segments: tuple[Tensor, ...]
    addresses: Tensor
    per_segment: int
    row_bytes: int

    @classmethod
    def of(cls, segments: list[Tensor], device: torch.device) -> HostRows:
        """`segments`: one or more, all of one shape."""
        addresses = torch.tensor([segment.data_ptr() for segment in segments], dtype=torch.int64, device=device)
        return cls(tuple(segments), addresses, segments[0].shape[0], segments[0].shape[1])

    @property
    def capacity(self) -> int:
        return len(self.segments) * self.per_segment


@dataclass(frozen=True)
class HotBuffer:
    """Rows of one layer that lie on the device because they were recalled not long ago. All tensors change in place.

    buffer: uint8 [slots, row_bytes]. owner: int32 [slots], the row in each slot, -1 for none. stamp: int32 [slots], the
    step in which it was last used. slot_of: int32 [rows], the slot of each row, -1 for none. first: int32 [B + 1]:
    sequence b has the slots first[b] .. first[b + 1] - 1, the same numbers as `sizes` in Python. clock: int32 [B],
    steps so far. counters: int64 [B, 2], rows found and rows read.
    """

    buffer: Tensor
    owner: Tensor
    stamp: Tensor
    slot_of: Tensor
    first: Tensor
    clock: Tensor
    counters: Tensor
    sizes: tuple[int, ...]

    @classmethod
    def empty(cls, sizes: tuple[int, ...], row_bytes: int, rows: int, device: torch.device) -> HotBuffer:
        """A buffer with nothing in it. sizes: slots of each sequence; rows: row numbers are below."""
        slots = sum(sizes)
        first = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        return cls(
            buffer=torch.empty(slots, row_bytes, dtype=torch.uint8, device=device),
            owner=torch.full((slots,), -1, dtype=torch.int32, device=device),
            stamp=torch.zeros(slots, dtype=torch.int32, device=device),
            slot_of=torch.full((rows,), -1, dtype=torch.int32, device=device),
            first=first,
            clock=torch.zeros(len(sizes), dtype=torch.int32, device=device),
            counters=torch.zeros(len(sizes), 2, dtype=torch.int64, device=device),
            sizes=sizes,
        )

    def with_rows(self, rows: int) -> HotBuffer:
        """The same buffer for row numbers below `rows`; itself where there is room already."""
        more = rows - self.slot_of.shape[0]
        if more <= 0:
            return self
        slot_of = torch.cat([self.slot_of, self.slot_of.new_full((more,), -1)])
        return HotBuffer(
            self.buffer, self.owner, self.stamp, slot_of, self.first, self.clock, self.counters, self.sizes
        )

    @property
    def nbytes(self) -> int:
        parts = (self.buffer, self.owner, self.stamp, self.slot_of, self.first, self.clock, self.counters)
        return sum(part.nbytes for part in parts)

    def check(self) -> str:
        """Every row in a slot is found there; returns the arithmetic. Raises AssertionError where it is not."""
        slots = (self.owner >= 0).nonzero().flatten()
        rows = self.owner[slots].long()
        found = int((self.slot_of >= 0).sum())
        text = f"hot buffer: {len(slots)} of {len(self.owner)} slots in use = {found} rows found"
        if found != len(slots) or not torch.equal(self.slot_of[rows].long(), slots):
            raise AssertionError(f"hot buffer does not add up: {text}")
        return text
