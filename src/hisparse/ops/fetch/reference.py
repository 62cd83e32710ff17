"""Rows from the host in plain torch, one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops.fetch.types import AGES, HostRows, HotBuffer


def _read(source: HostRows, rows: Tensor) -> Tensor:
    """uint8 [n, row_bytes] on the device of rows [n]. Waits for what the device may still be writing."""
    ids = rows.long().cpu()
    found = torch.empty(len(ids), source.row_bytes, dtype=torch.uint8)
    segment = ids // source.per_segment
    for number in sorted(set(segment.tolist())):
        here = segment == number
        found[here] = source.segments[number][ids[here] % source.per_segment]
    return found.to(rows.device)


def fetch_rows(hot: HotBuffer, source: HostRows, rows: Tensor, number: Tensor, early: bool = False) -> Tensor:
    """See :func:`hisparse.ops.fetch.fetch_rows`; `early` changes nothing."""
    table = torch.zeros_like(rows)
    hot.clock.add_(1)
    start = 0
    for i, size in enumerate(hot.sizes):
        wanted = rows[i, : max(0, int(number[i]))].long()
        slot = hot.slot_of[wanted].long()
        found = slot >= 0
        owner, stamp = hot.owner[start : start + size], hot.stamp[start : start + size]
        now = hot.clock[i]
        hot.stamp[slot[found]] = now
        age = torch.where(owner < 0, AGES - 1, (now - stamp).clamp_max(AGES - 1))
        missing = wanted[~found]
        age_order = age.sort(descending=True, stable=True).indices[: len(missing)]
        victims = age_order.sort().values + start
        old = hot.owner[victims]
        hot.slot_of[old[old >= 0].long()] = -1
        hot.owner[victims] = missing.int()
        hot.slot_of[missing] = victims.int()
        hot.stamp[victims] = now
        hot.buffer[victims] = _read(source, missing)
        slot[~found] = victims
        table[i, : len(wanted)] = slot.int()
        hot.counters[i, 0] += found.sum()
        hot.counters[i, 1] += len(missing)
        start += size
    return table


def held_rows(hot: HotBuffer, width: int) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.ops.fetch.held_rows`. Every shape is static, so this serves the kernels' twins as well."""
    batch, slots = len(hot.sizes), len(hot.owner)
    slot = hot.first[:-1, None] + torch.arange(width, dtype=torch.int32, device=hot.first.device)
    used = (slot < hot.first[1:, None]) & (hot.owner[slot.clamp_max(slots - 1).long()] >= 0)
    place = torch.where(used, used.cumsum(1) - 1, width)
    table = slot.new_zeros(batch, width + 1).scatter_(1, place, slot)[:, :width].contiguous()
    return table, used.sum(1, dtype=torch.int32)


def gather_rows(source: HostRows, rows: Tensor, number: Tensor | None) -> Tensor:
    """See :func:`hisparse.ops.fetch.gather_rows`."""
    out = torch.empty(rows.numel(), source.row_bytes, dtype=torch.uint8, device=rows.device)
    if number is None:
        out.copy_(_read(source, rows.flatten()))
        return out
    wanted = torch.arange(rows.shape[1], device=rows.device) < number[:, None]
    out[wanted.flatten()] = _read(source, rows[wanted])
    return out


def store_rows(source: HostRows, rows: Tensor, pages: Tensor) -> None:
    """See :func:`hisparse.ops.fetch.store_rows`."""
    ids, pages = rows.long().cpu(), pages.cpu()
    segment = ids // source.per_segment
    for number in sorted(set(segment.tolist())):
        here = segment == number
        source.segments[number][ids[here] % source.per_segment] = pages[here]


def forget_rows(hot: HotBuffer, rows: Tensor) -> None:
    """See :func:`hisparse.ops.fetch.forget_rows`."""
    index, slots = rows.long(), len(hot.owner)
    slot = hot.slot_of[index].long()
    gone = torch.zeros(slots + 1, dtype=torch.bool, device=rows.device)  # no list of slots: the host would wait for it
    gone.index_fill_(0, torch.where(slot < 0, slots, slot), True)
    hot.owner.masked_fill_(gone[:-1], -1)
    hot.slot_of.index_fill_(0, index, -1)
