"""Attention of a chunk over everything a layer holds, in one softmax: dense slots, kept pages, rows, the chunk; and the
choice of the rows that a chunk reads back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops._dispatch import select_backend
from hisparse.ops.fetch import HostRows, gather_rows
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

__all__ = ["Packed", "attend", "attend_recalled", "chunk_samples", "select_for_chunk"]


@dataclass(frozen=True)
class Packed:
    """Packed tokens of one sequence and layer.

    pages: uint8 [n, fmt.page_bytes], or rows in the host's memory. ids: int64 [m], which of these pages, in any order;
    None for all of them. What lies on the host (best pinned) is brought to the queries' device a slice at a time while
    the slice before is attended to. `ids` may lie on either device; those on the host tell adjacent pages, which are
    copied without a kernel.
    """

    pages: Tensor | HostRows
    fmt: PageFormat
    ids: Tensor | None = None

    @property
    def count(self) -> int:
        """Pages to attend to."""
        if self.ids is not None:
            return len(self.ids)
        return self.pages.capacity if isinstance(self.pages, HostRows) else len(self.pages)

    def read(self, device: torch.device) -> Tensor:
        """All of them at once, uint8 [count, page_bytes] on `device`."""
        if isinstance(self.pages, HostRows):
            if self.ids is not None:
                return gather_rows(self.pages, self.ids.to(device=device, dtype=torch.int32)[None])
            pages = torch.cat(self.pages.segments)
        else:
            pages = self.pages if self.ids is None else self.pages.index_select(0, self.ids.to(self.pages.device))
        return pages if pages.device == device else pages.to(device, non_blocking=True)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    packed: list[Packed],
    stats: ChannelStats | None,
    scaling: float,
) -> Tensor:
    """Attention of one sequence's chunk over its whole past and, causally, over itself.

    q: [Hq, T, D]; k, v: [H, T, D] of the same chunk; dense_k, dense_v: [H, S, D] all visible; packed: groups of pages,
    all visible (kept pages, recalled rows, or every row there is). `stats` may be None where `packed` is empty.
    Returns [Hq, T, D] in q's dtype. The past needs no order, for keys are stored as RoPE has turned them.

    On CUDA the past is unpacked into a work space of fixed size, a slice at a time, and the slices' results are
    combined by their log-sum-exp (Dao et al. 2022), so that memory does not grow with the past.
    """
    backend = select_backend("attend", q.device)
    return backend.attend(q, k, v, dense_k, dense_v, packed, stats, scaling)  # type: ignore[no-any-return]


def attend_recalled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    kept: list[Packed],
    recalled: Packed,
    stats: ChannelStats,
    scaling: float,
) -> Tensor:
    """As :func:`attend`, but each query has recalled rows of its own: `recalled.pages` uint8 [T, n, page_bytes]."""
    backend = select_backend("attend", q.device)
    return backend.attend_recalled(q, k, v, dense_k, dense_v, kept, recalled, stats, scaling)  # type: ignore[no-any-return]


def chunk_samples(chunk: int, spread: int = 64, last: int = 16) -> Tensor:
    """int64, ascending: queries that speak for a chunk of `chunk` tokens: `spread` evenly spaced, and the `last`."""
    even = torch.linspace(0, max(chunk - 1, 0), min(spread, chunk), dtype=torch.float32).round().long()
    found: Tensor = torch.unique(torch.cat([even, torch.arange(max(0, chunk - last), chunk)]))
    return found


def select_for_chunk(
    q: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float, count: int
) -> Tensor:
    """The `count` rows of set-aside tokens that a whole chunk reads back, one set for all its queries and heads.

    q: [Hq, T, D], the chunk's queries. codes, scales: sketches of n rows of R tokens, as `score_sketch` takes them. A
    row is worth the sum, over a sample of the queries (:func:`chunk_samples`) and over query heads, of the square root
    of the share of estimated attention that falls on it: as in one step's selection, but summed over queries, since a
    chunk shares its budget. Returns int64 [min(count, n)] row numbers, in no particular order. Raises FormatError for
    a count below 0.
    """
    if count < 0:
        raise FormatError(f"select_for_chunk: count = {count}; give the number of rows to read back, 0 or more")
    count = min(count, len(scales))
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=q.device)
    sample = q[:, chunk_samples(q.shape[1]).to(q.device)]
    backend = select_backend("attend", q.device)
    return backend.select_for_chunk(sample, codes, scales, stats, scaling, count)  # type: ignore[no-any-return]
