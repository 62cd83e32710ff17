"""What goes into decode attention and comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hisparse.vtq.format import PageFormat


@dataclass(frozen=True)
class Pages:
    """Packed tokens of a batch of sequences, one layer.

    pool: uint8 [n_pages, fmt.page_bytes], rows a multiple of 16 bytes apart (a view into wider rows will do); table:
    int32 [B, max_pages], ids of each sequence's pages; count: int32 [B], how many of its table's first entries are in
    use, each a full page. What lies beyond is never read."""

    pool: Tensor
    table: Tensor
    count: Tensor
    fmt: PageFormat


class Early(NamedTuple):
    """What attention that starts early needs: memory float32 [n] for its parts, and how many hot buffers the rows that
    it recalls are fetched through, which the fetch has multiprocessors for meanwhile."""

    memory: Tensor
    buffers: int


class DecodeResult(NamedTuple):
    """out [B, Hq, D] in q's dtype; lse float32 [B, Hq], natural log-sum-exp of all scores.

    kept_mass, recalled_mass: float32 [B, Hq, max_pages], natural log-sum-exp of each page's scores (entries beyond a
    sequence's count are undefined), or None: ``exp(mass - lse)`` is the share of attention that fell on the page.
    """

    out: Tensor
    lse: Tensor
    kept_mass: Tensor | None
    recalled_mass: Tensor | None
