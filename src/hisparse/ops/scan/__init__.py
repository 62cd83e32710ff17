"""Scanning the sketches of a batch in one decode step, and choosing the rows to read back.

This is the batched twin of `score_sketch` followed by `select_rows`, for one query a sequence: rows are scored where
they lie in the pools, by tables of row ids, and the scores of single tokens never leave the chip. Lengths live on the
device and every shape is static, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops._dispatch import select_backend
from hisparse.ops.sketch import sketch_bytes
from hisparse.vtq.stats import ChannelStats

__all__ = ["Chosen", "scan_and_select", "scan_rows", "select_top"]


class Chosen(NamedTuple):
    """rows: int32 [B, budget], entries of the table, each at most once, in no particular order; number: int32 [B],
    how many of them are set (the rest is 0)."""

    rows: Tensor
    number: Tensor


def scan_rows(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    table: Tensor,
    count: Tensor,
    stats: ChannelStats,
    scaling: float,
    bits: int,
) -> Tensor:
    """What each row is worth to one query a sequence.

    q: [B, Hq, D] post-RoPE. codes: uint8 [n, H * R * D * bits / 8] and scales: uint8 [n, H * R], the pools that
    `build_sketch` fills (R tokens a row); rows may be apart (a range of columns of wider rows), by a multiple of 16
    bytes for the fastest kernels. table: int32 [B, max_rows], row ids of each sequence; count: int32 [B], how
    many of them are in use: what lies beyond is not read. bits: 1 or 2.

    Returns float32 [B, max_rows]: the sum over query heads of the square root of the share of the head's estimated
    attention (over this sequence's rows) that falls on the row; -inf beyond the count. Raises FormatError for pools and
    tables that do not fit.
    """
    _check_scan("scan_rows", q, codes, scales, table, count, stats, bits)
    result: Tensor = select_backend("scan", q.device).scan_rows(q, codes, scales, table, count, stats, scaling, bits)
    return result


def select_top(worth: Tensor, table: Tensor, count: Tensor, budget: int, wanted: Tensor | None = None) -> Chosen:
    """The rows of each sequence that are worth most.

    worth: float32 [B, max_rows], not negative where in use (see `scan_rows`); table, count: as there. budget: rows
    that the result has room for. wanted: int32 [B], how many to choose for each sequence, at most `budget` (None:
    `budget` for all). Which of several rows of equal worth is taken is not defined, but it is the same one each time.
    Raises FormatError for shapes that do not fit.
    """
    if worth.shape != table.shape or worth.dtype != torch.float32:
        raise FormatError(
            f"select_top: worth is {worth.dtype} {list(worth.shape)}, the table {list(table.shape)}; "
            "worth must be float32 of the table's shape"
        )
    _check_table("select_top", table, count, worth.shape[0])
    _check_choice("select_top", count, budget, wanted)
    result: Chosen = select_backend("scan", worth.device).select_top(worth, table, count, budget, wanted)
    return result


def scan_and_select(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    table: Tensor,
    count: Tensor,
    stats: ChannelStats,
    scaling: float,
    bits: int,
    budget: int,
    wanted: Tensor | None = None,
) -> Chosen:
    """`select_top` of `scan_rows`, in fewer launches. Arguments and errors as there."""
    _check_scan("scan_and_select", q, codes, scales, table, count, stats, bits)
    _check_choice("scan_and_select", count, budget, wanted)
    result: Chosen = select_backend("scan", q.device).scan_and_select(
        q, codes, scales, table, count, stats, scaling, bits, budget, wanted
    )
    return result


def _check_scan(
    what: str, q: Tensor, codes: Tensor, scales: Tensor, table: Tensor, count: Tensor, stats: ChannelStats, bits: int
) -> None:
    heads, dim = stats.heads, stats.head_dim
    if q.dim() != 3 or q.shape[2] != dim or q.shape[1] % heads:
        raise FormatError(
            f"{what}: q has shape {list(q.shape)}; it must be [B, a multiple of {heads}, {dim}] for these statistics"
        )
    token = heads * (sketch_bytes(dim, bits) - 1)
    for name, x, unit in (("codes", codes, token), ("scales", scales, heads)):
        if x.dtype != torch.uint8 or x.dim() != 2 or not x.shape[1] or x.shape[1] % unit:
            raise FormatError(
                f"{what}: {name} are {x.dtype} {list(x.shape)}; {bits}-bit sketches of {heads} heads x {dim} channels "
                f"need uint8 [n, a multiple of {unit}]"
            )
    for name, x in (("codes", codes), ("scales", scales)):
        if x.stride(1) != 1 or (name == "codes" and (x.data_ptr() | x.stride(0)) % 2):
            raise FormatError(
                f"{what}: {name} have strides {list(x.stride())} from byte {x.storage_offset()}; a row's bytes must be "
                "adjacent, and rows of codes begin at even addresses"
            )
    if codes.shape[1] // token != scales.shape[1] // heads or len(codes) != len(scales):
        raise FormatError(
            f"{what}: codes {list(codes.shape)} and scales {list(scales.shape)} hold different rows; "
            "give the two pools of one layer"
        )
    _check_table(what, table, count, q.shape[0])


def _check_choice(what: str, count: Tensor, budget: int, wanted: Tensor | None) -> None:
    if budget < 1:
        raise FormatError(f"{what}: budget = {budget}; it must be 1 or more")
    if wanted is not None and (wanted.dtype != torch.int32 or wanted.shape != count.shape):
        raise FormatError(
            f"{what}: wanted is {wanted.dtype} {list(wanted.shape)}; it must be int32 {list(count.shape)}"
        )


def _check_table(what: str, table: Tensor, count: Tensor, batch: int) -> None:
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        raise FormatError(
            f"{what}: the table is {table.dtype} {list(table.shape)}; it must be int32 [{batch}, max_rows]"
        )
    if count.dtype != torch.int32 or tuple(count.shape) != (batch,):
        raise FormatError(f"{what}: count is {count.dtype} {list(count.shape)}; it must be int32 [{batch}]")
