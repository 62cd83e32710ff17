"""Rows from the host's memory: read in place by the device, through a buffer of rows used not long ago.

Neighbouring steps of decoding want almost the same rows. `fetch_rows` keeps those of the last steps on the device and
reads only what is missing, straight from pinned host memory (zero copy), into the slots whose last use is longest ago.
Every shape follows from the arguments' shapes and nothing waits for the device, so that calls can be captured in a CUDA
graph.

Replacement is least recently used, told apart up to AGES steps. Neighbouring steps share most of their rows, and a row
comes back after a pause as well; of the orders that need no list on the device, the time of the last use keeps such
rows longest. Which age makes room for all missing rows is found by counting the slots of each age: nothing is sorted.
Ties go to the lower slot, so that the same calls give the same slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops._dispatch import select_backend
from hisparse.ops.fetch.types import AGES, HostRows, HotBuffer

__all__ = ["AGES", "HostRows", "HotBuffer", "fetch_rows", "forget_rows", "gather_rows", "held_rows", "store_rows"]


def fetch_rows(
    hot: HotBuffer,
    source: HostRows,
    rows: Tensor,
    number: Tensor,
    most: Sequence[int] | None = None,
    *,
    early: bool = False,
) -> Tensor:
    """Bring rows into the buffer; returns their slots.

    rows: int32 [B, budget], of which each sequence wants the first number int32 [B], each row once and by one sequence
    only. Rows that are in the buffer are used where they are; the others replace rows that are not among `rows` and
    were used longest ago. `hot` is changed: buffer, books and counters. most: upper bounds of the numbers that the host
    knows; `budget` for each sequence where it knows none. early: rows and number come from the scan that was launched
    last on this stream (`hisparse.ops.scan.scan_and_select`), and `hot` and `source` have not changed since it was; the
    books may then be read while it still runs.

    Returns int32 [B, budget], the slot of each row in ``hot.buffer`` (0 beyond the number), valid until the next call
    with the same `hot`. Raises FormatError for shapes and dtypes that do not fit, and where a sequence has fewer slots
    than it may want rows: they must hold everything that one step uses.
    """
    batch = len(hot.sizes)
    _check_rows("fetch_rows", rows, number, batch)
    _check_source("fetch_rows", source)
    if hot.buffer.shape[1] != source.row_bytes:
        raise FormatError(
            f"fetch_rows: the buffer has rows of {hot.buffer.shape[1]} bytes, the host of {source.row_bytes}; "
            "use those of one layer"
        )
    for size, bound in zip(hot.sizes, (rows.shape[1],) * batch if most is None else most, strict=True):
        if size < min(bound, rows.shape[1]):
            raise FormatError(
                f"fetch_rows: a sequence has {size} slots in the hot buffer, but one step may use {bound} rows; give "
                "it as many slots or more"
            )
    backend = select_backend("fetch", rows.device)
    table: Tensor = backend.fetch_rows(hot, source, rows, number, **({"early": True} if early else {}))
    return table


def held_rows(hot: HotBuffer) -> tuple[Tensor, Tensor]:
    """All rows in the buffer: slots int32 [B, width] of each sequence, and their number int32 [B].

    What lies beyond the number is undefined; `width` follows from the buffer's sizes. Valid until the next
    `fetch_rows`.
    """
    width = -(-max(hot.sizes) // 64) * 64
    held: tuple[Tensor, Tensor] = select_backend("fetch", hot.owner.device).held_rows(hot, width)
    return held


def gather_rows(source: HostRows, rows: Tensor, number: Tensor | None = None) -> Tensor:
    """Rows of the host, past any buffer: uint8 [B * budget, row_bytes] on the device of `rows`.

    rows: int32 [B, budget]; number: int32 [B], how many of them each sequence wants (None: all). Row i of sequence b
    comes to place b * budget + i; places beyond the number are left as they are. Raises FormatError as `fetch_rows`.
    """
    _check_rows("gather_rows", rows, number, rows.shape[0])
    _check_source("gather_rows", source)
    if not rows.numel():
        return torch.empty((0, source.row_bytes), dtype=torch.uint8, device=rows.device)
    gathered: Tensor = select_backend("fetch", rows.device).gather_rows(source, rows, number)
    return gathered


def store_rows(source: HostRows, rows: Tensor, pages: Tensor) -> None:
    """Write `pages` uint8 [n, row_bytes] to rows int32 [n], each once, both on the device; the host's memory changes.

    On a GPU the call does not wait: what is read later on the same stream sees the new rows, the host after it has
    waited for the stream. Raises FormatError for shapes and dtypes that do not fit.
    """
    _check_source("store_rows", source)
    if pages.dtype != torch.uint8 or pages.dim() != 2 or tuple(pages.shape) != (*rows.shape, source.row_bytes):
        raise FormatError(
            f"store_rows: pages are {pages.dtype} {list(pages.shape)} for rows {list(rows.shape)}; give uint8 "
            f"[n, {source.row_bytes}] for n rows"
        )
    if rows.dtype != torch.int32:
        raise FormatError(f"store_rows: rows are {rows.dtype}; give int32")
    if len(rows):
        select_backend("fetch", rows.device).store_rows(source, rows, pages)


def forget_rows(hot: HotBuffer, rows: Tensor) -> None:
    """Take rows int32 [n] out of the buffer, where they are in it: they were released, or written anew on the host."""
    if rows.dtype != torch.int32 or rows.dim() != 1:
        raise FormatError(f"forget_rows: rows are {rows.dtype} {list(rows.shape)}; give int32 [n]")
    if len(rows):
        select_backend("fetch", rows.device).forget_rows(hot, rows)


def _check_rows(what: str, rows: Tensor, number: Tensor | None, batch: int) -> None:
    if rows.dtype != torch.int32 or rows.dim() != 2 or rows.shape[0] != batch:
        raise FormatError(f"{what}: rows are {rows.dtype} {list(rows.shape)}; give int32 [{batch}, budget]")
    if number is not None and (number.dtype != torch.int32 or tuple(number.shape) != (batch,)):
        raise FormatError(f"{what}: number is {number.dtype} {list(number.shape)}; give int32 [{batch}]")


def _check_source(what: str, source: HostRows) -> None:
    if source.row_bytes % 16:
        raise FormatError(f"{what}: rows of {source.row_bytes} bytes; they are read 16 at a time, give a multiple")
