"""One sequence: which positions are dense, kept or set aside. Bookkeeping only; all layers follow the same commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse.cache.geometry import SINKS
from hisparse.cache.pools import PageIds

Ints = npt.NDArray[np.int64]

UNDECIDED, KEEP, ASIDE = 0, 1, 2


@dataclass(frozen=True)
class View:
    """What a sequence held before a chunk.

    Every layer attends to this, though the first layer has moved the sequence on. Ids are kept as lists that only grow,
    and become tensors where a layer asks for them. scan: rows are chosen anew.
    """

    length: int
    slots: int
    n_pages: int
    n_rows: int
    page_list: list[int]
    row_list: list[int]
    device: torch.device
    scan: bool = True

    @cached_property
    def pages(self) -> Tensor:
        """int64 [n_pages], on the device."""
        return torch.tensor(self.page_list[: self.n_pages], dtype=torch.int64, device=self.device)

    @cached_property
    def rows(self) -> Tensor:
        """int64 [n_rows], on the device."""
        return self.host_rows.to(self.device)

    @cached_property
    def host_rows(self) -> Tensor:
        """int64 [n_rows], on the host."""
        return torch.tensor(self.row_list[: self.n_rows], dtype=torch.int64)


@dataclass(frozen=True)
class Indices:
    """A commit's numbers as int64 tensors on a device, of the same shapes."""

    page_ids: Tensor
    page_index: Tensor
    row_ids: Tensor
    row_index: Tensor
    remain: Tensor


@dataclass(frozen=True)
class Commit:
    """What every layer does with a chunk after attending to it.

    Indices count over [dense slots of before | tokens of the chunk].
    """

    chunk: int
    page_ids: Ints  # [p]
    page_index: Ints  # [p, page_size]
    row_ids: Ints  # [r]
    row_index: Ints  # [r, row_size]
    remain: Ints  # [new number of dense slots]
    _copies: Indices | None = field(default=None, repr=False, compare=False)

    @property
    def appends_only(self) -> bool:
        """True where the chunk just goes into the next free slots."""
        return not len(self.page_ids) and not len(self.row_ids) and len(self.remain) == self.remain[-1] + 1

    @cached_property
    def host(self) -> Indices:
        parts = (self.page_ids, self.page_index, self.row_ids, self.row_index, self.remain)
        return Indices(*(torch.from_numpy(part) for part in parts))

    def indices(self, device: torch.device) -> Indices:
        """Copied to `device` once, for all layers."""
        if device.type == "cpu":
            return self.host
        if self._copies is None or self._copies.remain.device != device:
            host = self.host
            parts = (host.page_ids, host.page_index, host.row_ids, host.row_index, host.remain)
            copies = Indices(*(part.pin_memory().to(device, non_blocking=True) for part in parts))
            object.__setattr__(self, "_copies", copies)
            return copies
        return self._copies


@dataclass
class Sequence:
    """State of one sequence (batch row).

    `decide(importance float32 [n]) -> keep bool [n]` is asked once for every token that leaves the tail, in order.
    """

    page_ids: PageIds
    row_ids: PageIds
    page_size: int
    row_size: int
    prefix_length: int
    evict: str
    length: int = 0
    dense: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # positions, ascending
    importance: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))  # of the dense tokens
    decision: npt.NDArray[np.int8] = field(default_factory=lambda: np.empty(0, np.int8))  # of the dense tokens
    pages: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    kept: list[Ints] = field(default_factory=list)  # positions, in page order
    aside: list[Ints] = field(default_factory=list)  # positions, in row order
    kept_total: int = 0  # decided to be kept, packed or still waiting
    graduated: int = 0  # decided at all
    dropped: int = 0

    def extend(
        self, importance: npt.NDArray[np.float32], decide: Callable[[npt.NDArray[np.float32]], object]
    ) -> Commit:
        """Append `len(importance)` tokens, decide about those that leave the tail, and fill pages and rows."""
        chunk = len(importance)
        positions = np.concatenate([self.dense, np.arange(self.length, self.length + chunk)])
        scores = np.concatenate([self.importance, importance])
        decision = np.concatenate([self.decision, np.zeros(chunk, np.int8)])
        self.length += chunk
        leaving = np.flatnonzero(
            (decision == UNDECIDED) & (positions >= SINKS) & (positions < self.length - self.prefix_length)
        )
        if len(leaving):
            keep = np.asarray(decide(scores[leaving]), dtype=bool)
            decision[leaving] = np.where(keep, KEEP, ASIDE)
            self.graduated += len(leaving)
            self.kept_total += int(keep.sum())
        page_index = self._full(decision, KEEP, self.page_size)
        if self.evict == "drop":
            gone = np.flatnonzero(decision == ASIDE)
            self.dropped += len(gone)
            row_index = np.empty((0, self.row_size), np.int64)
        else:
            row_index = self._full(decision, ASIDE, self.row_size)
            gone = row_index.reshape(-1)
        stays = np.ones(len(positions), bool)
        stays[page_index.reshape(-1)] = False
        stays[gone] = False
        remain = np.flatnonzero(stays)
        commit = Commit(
            chunk=chunk,
            page_ids=np.array(self.page_ids.take(len(page_index)), np.int64),
            page_index=page_index,
            row_ids=np.array(self.row_ids.take(len(row_index)), np.int64),
            row_index=row_index,
            remain=remain,
        )
        if len(page_index):
            self.pages += commit.page_ids.tolist()
            self.kept.append(positions[page_index.reshape(-1)])
        if len(row_index):
            self.rows += commit.row_ids.tolist()
            self.aside.append(positions[row_index.reshape(-1)])
        self.dense, self.importance, self.decision = positions[remain], scores[remain], decision[remain]
        return commit

    def view(self, device: torch.device, scan: bool = True) -> View:
        """The present state, for layers to attend to."""
        return View(self.length, len(self.dense), len(self.pages), len(self.rows), self.pages, self.rows, device, scan)

    @staticmethod
    def _full(decision: npt.NDArray[np.int8], what: int, size: int) -> Ints:
        """Indices [n, size] of the oldest tokens decided as `what`, in as many full groups as there are."""
        index = np.flatnonzero(decision == what)
        return index[: len(index) // size * size].reshape(-1, size)

    def positions(self) -> tuple[Ints, Ints, Ints]:
        """Positions held densely, in kept pages, and in rows."""
        empty = np.empty(0, np.int64)
        return self.dense, np.concatenate([empty, *self.kept]), np.concatenate([empty, *self.aside])

    @property
    def table_bytes(self) -> int:
        """Bytes of the page tables and kept positions on the device."""
        return 4 * (len(self.pages) + len(self.rows)) + 4 * sum(len(p) for p in self.kept)

    def check(self) -> str:
        """Every position is in exactly one place; returns the arithmetic.

        Raises AssertionError where it does not add up.
        """
        dense, kept, aside = self.positions()
        text = (
            f"{self.length} tokens = {len(dense)} dense + {len(kept)} kept in {len(self.pages)} pages of "
            f"{self.page_size} + {len(aside)} set aside in {len(self.rows)} rows of {self.row_size} + "
            f"{self.dropped} dropped"
        )
        together = np.sort(np.concatenate([dense, kept, aside]))
        unique = len(np.unique(together)) == len(together)
        good = (
            unique
            and len(dense) + len(kept) + len(aside) + self.dropped == self.length
            and len(kept) == len(self.pages) * self.page_size
            and len(aside) == len(self.rows) * self.row_size
            and (self.dropped > 0 or np.array_equal(together, np.arange(self.length)))
            and len(set(self.pages)) == len(self.pages)
            and len(set(self.rows)) == len(self.rows)
        )
        if not good:
            raise AssertionError(f"sequence does not add up: {text}; positions unique: {unique}")
        return text
