"""Exact selection by value, linear in the number of values and the same on every device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hisparse.errors import FormatError, InputError


def check_importance(importance: Tensor) -> Tensor:
    """`importance` as float32 [T].

    Raises:
        FormatError: not one-dimensional, not floating point, or a value that is NaN or outside (0, 1).
    """
    if importance.ndim != 1 or not importance.is_floating_point():
        raise FormatError(
            f"importance has shape {tuple(importance.shape)} and type {importance.dtype}; "
            "give one floating-point value a token, shape [T]"
        )
    p = importance.detach().float()
    if p.numel() == 0:
        return p
    low, high = torch.aminmax(p)  # NaN if any value is
    if not bool((low > 0) & (high < 1)):
        wrong = ~((p > 0) & (p < 1))
        where = int(wrong.nonzero()[0, 0])
        raise FormatError(
            f"importance[{where}] = {float(p[where])} ({int(wrong.sum())} of {p.numel()} values are NaN or outside "
            "(0, 1)); give probabilities strictly between 0 and 1, e.g. a sigmoid's output clamped to [1e-6, 1 - 1e-6]"
        )
    return p


def check_limits(threshold: float, channels: int, keep_limit: int | None) -> None:
    """Raise InputError for a threshold, channel count or limit that means nothing."""
    if math.isnan(threshold):
        raise InputError("threshold is NaN; give a number, tokens of at least that importance become anchors")
    if channels < 1:
        raise InputError(f"channels = {channels}; give the channels of one layer's K, kv_heads * head_dim, at least 1")
    if keep_limit is not None and keep_limit < 0:
        raise InputError(f"keep_limit = {keep_limit}; give the most tokens that may be kept, at least 0, or None")


def strongest(values: Tensor, count: int) -> Tensor:
    """Mask [M] of the `count` largest of `values` [M]; of equal ones the earlier win. Linear: no sort."""
    size = values.shape[0]
    if count >= size:
        return torch.ones(size, dtype=torch.bool, device=values.device)
    if count <= 0:
        return torch.zeros(size, dtype=torch.bool, device=values.device)
    cut = torch.kthvalue(values, size - count + 1).values
    above, equal = values > cut, values == cut
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))
