"""What a decode step needs to know of every sequence, on the device: page tables, row tables, counts, places.

Tables grow as sequences do and are written where they grew. What changes from step to step goes over in one copy for
all layers, from pinned memory, so that the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse.cache.geometry import Geometry, rounded, spare_entries
from hisparse.cache.sequence import Commit, Ints, View


def upload(parts: Many[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """int64 tensors of the parts' shapes on `device`, by one copy that the host does not wait for."""
    flat = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]) if parts else np.empty(0, np.int64))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    pieces = torch.split(flat, [part.size for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


@dataclass(frozen=True)
class Packing:
    """Tokens of dense slots that go to pages or rows: ids int64 [n], the lowest and highest of which is `span`, and the
    batch row [n, 1] and the slots [n, tokens] to take them from."""

    span: tuple[int, int]
    ids: Tensor
    batch: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Step:
    """One new token a sequence, as every layer handles it: attend to what was there and the token, then pack.

    scan: rows are chosen anew (else the last choice serves again). most: rows that each sequence recalls; `budget`:
    room for them in a table, and `everything`: they are all the rows there are. hot: slots of each sequence in a
    layer's hot buffer, all 0 for none. batch, place: int64 [B], the new token's batch row and dense slot. dense_len,
    page_count, row_count, wanted: int32 [B]. pages, rows: what is packed after attention, None for nothing; remain:
    int64 [B, S], which slots then move to which, None where none moves.
    """

    scan: bool
    most: tuple[int, ...]
    budget: int
    everything: bool
    hot: tuple[int, ...]
    has_pages: bool
    has_rows: bool
    batch: Tensor
    place: Tensor
    dense_len: Tensor
    page_count: Tensor
    row_count: Tensor
    wanted: Tensor
    pages: Packing | None
    rows: Packing | None
    remain: Tensor | None


class Tables:
    """Ids of every sequence's pages and rows, int32 [B, width] each; one instance serves all layers.

    faults: int32 [1], blocks that held values which cannot be packed, counted by kernels and looked at once a step.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch, self.device = batch, device
        self.pages = torch.zeros((batch, 0), dtype=torch.int32, device=device)
        self.rows = torch.zeros((batch, 0), dtype=torch.int32, device=device)
        self.faults = torch.zeros(1, dtype=torch.int32, device=device)
        self.hot: tuple[int, ...] = (0,) * batch

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes + self.rows.nbytes + self.faults.nbytes

    def _grow(self, table: Tensor, width: int) -> Tensor:
        if width <= table.shape[1]:
            return table
        with torch.inference_mode(False):
            grown = torch.zeros((self.batch, width + spare_entries(width)), dtype=torch.int32, device=self.device)
        grown[:, : table.shape[1]] = table
        return grown

    def _append(self, views: Many[View], commits: Many[Commit | None]) -> list[Ints]:
        """Make room for the commits' ids; returns (flat places, ids) of the new pages, then of the new rows."""
        made = [commit or NOTHING for commit in commits]
        starts = [[view.n_pages for view in views], [view.n_rows for view in views]]
        ids = [[commit.page_ids for commit in made], [commit.row_ids for commit in made]]
        widths = [max(n + len(new) for n, new in zip(*pair, strict=True)) for pair in zip(starts, ids, strict=True)]
        self.pages, self.rows = self._grow(self.pages, widths[0]), self._grow(self.rows, widths[1])
        parts: list[Ints] = []
        for table, start, new in zip((self.pages, self.rows), starts, ids, strict=True):
            width = table.shape[1]
            places = [b * width + n + np.arange(len(i)) for b, (n, i) in enumerate(zip(start, new, strict=True))]
            parts += [np.concatenate(places), np.concatenate(new)]
        return parts

    def _write(self, parts: list[Tensor]) -> None:
        for table, places, ids in ((self.pages, *parts[:2]), (self.rows, *parts[2:])):
            if len(ids):
                table.view(-1).index_copy_(0, places, ids.int())

    def extend(self, views: Many[View], commits: Many[Commit | None]) -> None:
        """Take in what a chunk adds to sequences that were `views`."""
        parts = self._append(views, commits)
        if any(part.size for part in parts):
            self._write(upload(parts, self.device))

    def hot_sizes(self, targets: Many[int], most: Many[int]) -> tuple[int, ...]:
        """Slots of each sequence in the hot buffer, for targets and for the rows that each recalls now.

        They stay as they are, for a buffer that changes its size starts empty, until one is too small or the targets
        have grown by a quarter.
        """
        if not any(targets):
            self.hot = (0,) * self.batch
        elif any(size < need for size, need in zip(self.hot, most, strict=True)) or 4 * sum(targets) >= 5 * sum(
            self.hot
        ):
            self.hot = tuple(max(target, rounded(need)) for target, need in zip(targets, most, strict=True))
        return self.hot

    def step(
        self, geometry: Geometry, views: Many[View], commits: Many[Commit], targets: Many[int], scan: bool
    ) -> Step:
        """Take in one new token a sequence, and say how layers handle it. `targets`: slots wished for in the hot
        buffer, for each sequence."""
        selection = geometry.config.selection
        most = tuple(min(-(-selection.budget(view.length + 1) // selection.row_size), view.n_rows) for view in views)
        counts = np.array(
            [(v.slots, v.slots + 1, v.n_pages, v.n_rows, m) for v, m in zip(views, most, strict=True)], np.int64
        ).T
        parts = [np.arange(self.batch), counts, *self._append(views, commits)]
        packings = (
            [(b, c.page_ids, c.page_index) for b, c in enumerate(commits)],
            [(b, c.row_ids, c.row_index) for b, c in enumerate(commits)],
        )
        for packing in packings:
            parts += [
                np.concatenate([ids for _, ids, _ in packing]),
                np.concatenate([np.full((len(ids), 1), b) for b, ids, _ in packing]),
                np.concatenate([index for _, _, index in packing]),
            ]
        moves = not all(commit.appends_only for commit in commits)
        if moves:
            remain = np.tile(np.arange(geometry.slots), (self.batch, 1))
            for row, commit in zip(remain, commits, strict=True):
                row[: len(commit.remain)] = commit.remain
            parts.append(remain)
        sent = upload(parts, self.device)
        self._write(sent[2:6])
        small = sent[1].int()
        pages, rows = (
            Packing((int(parts[i].min()), int(parts[i].max())), *sent[i : i + 3]) if parts[i].size else None
            for i in (6, 9)
        )
        return Step(
            scan=scan,
            most=most,
            budget=rounded(max(most)),
            everything=all(view.n_rows == m for view, m in zip(views, most, strict=True)),
            hot=self.hot_sizes(targets, most),
            has_pages=any(view.n_pages for view in views),
            has_rows=any(view.n_rows for view in views),
            batch=sent[0],
            place=sent[1][0],
            dense_len=small[1],
            page_count=small[2],
            row_count=small[3],
            wanted=small[4],
            pages=pages,
            rows=rows,
            remain=sent[-1] if moves else None,
        )

    def check(self, pages: Many[list[int]], rows: Many[list[int]]) -> str:
        """The tables hold the sequences' ids; returns the arithmetic. Raises AssertionError where they do not."""
        for name, table, ids in (("pages", self.pages, pages), ("rows", self.rows, rows)):
            for b, own in enumerate(ids):
                if table[b, : len(own)].tolist() != own:
                    raise AssertionError(f"the table of {name} of sequence {b} differs from the sequence's")
        return f"tables: {self.pages.shape[1]} pages + {self.rows.shape[1]} rows wide = {self.nbytes} bytes"


_NONE = np.empty(0, np.int64)
NOTHING = Commit(0, _NONE, _NONE, _NONE, _NONE, _NONE)
