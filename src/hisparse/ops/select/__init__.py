"""Row selection: which rows of set-aside tokens a step reads back."""

from __future__ import annotations

from torch import Tensor

from hisparse.ops._dispatch import select_backend


def select_rows(scores: Tensor, row_size: int, count: int) -> Tensor:
    """The `count` best rows for the whole layer, one set for all queries given.

    scores: float32 [Hq, T, n * row_size], estimated attention scores. A row is worth the sum over query heads of the
    square root of the share of estimated attention that the head gives its tokens (of several queries, the most to
    any): the root lets a head with one confident row and a head with many middling ones both have a say.
    Returns int64 [count] row numbers in 0..n-1, in no particular order.
    """
    return select_backend("select", scores.device).select_rows(scores, row_size, count)  # type: ignore[no-any-return]
