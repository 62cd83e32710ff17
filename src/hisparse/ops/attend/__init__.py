"""Attention of a chunk over everything a layer holds, in one softmax: dense slots, kept pages, rows, the chunk."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hisparse.ops._dispatch import select_backend
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats


@dataclass(frozen=True)
class Packed:
    """Packed tokens of one sequence and layer.

    pages: uint8 [n, fmt.page_bytes], on the queries' device.
    """

    pages: Tensor
    fmt: PageFormat


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
    Returns [Hq, T, D] in q's dtype.
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
