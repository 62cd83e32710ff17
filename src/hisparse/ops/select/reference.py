"""Row selection in plain torch."""

from __future__ import annotations

from torch import Tensor


def select_rows(scores: Tensor, row_size: int, count: int) -> Tensor:
    heads, chunk, tokens = scores.shape
    rows = scores.softmax(-1).reshape(heads, chunk, tokens // row_size, row_size).sum(-1)  # [Hq, T, n]
    worth: Tensor = rows.sqrt_().sum(0).amax(0)
    return worth.topk(min(count, worth.shape[0]), sorted=False).indices
