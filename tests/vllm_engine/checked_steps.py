"""The plugin's own kernels, and importance, against the plain code they stand for; see `checked_ops`."""

from __future__ import annotations

from typing import Any

import torch
from checked_ops import Check, Copies, same, watch, within
from gpu_on_cpu import Way
from torch import Tensor


def _set(target: Tensor, values: Tensor) -> None:
    target.copy_(values)


def renew(
    dense: Tensor, block: Tensor, slot: Tensor, past: Tensor, new_block: Tensor, new_slot: Tensor, k: Tensor, v: Tensor
) -> Check:
    copies = Copies()
    theirs, numbers = copies.of(dense), past.tolist()
    both = torch.stack([k, v], 1).to(dense.dtype)
    gathered = [dense[block[b, :n], slot[b, :n]] for b, n in enumerate(numbers)]
    for b in range(len(numbers)):  # one after the other: padding writes to the same place
        theirs[new_block[b], new_slot[b]] = both[b]
    nowhere = (new_block == 0).nonzero().flatten()

    def check(result: tuple[Tensor, Tensor]) -> None:
        out, length = result
        assert length.tolist() == [n + 1 for n in numbers]
        for b, n in enumerate(numbers):
            same(f"dense tokens of request {b}", _bits(out[b, :n]), _bits(gathered[b]))
            if n < out.shape[1]:
                same(f"new token of request {b}", _bits(out[b, n]), _bits(both[b]))
        theirs[0, new_slot[nowhere]] = dense[0, new_slot[nowhere]]  # programs come in any order
        copies.agree("renew")

    return check


def _bits(x: Tensor) -> Tensor:
    """Not a number is a number here, too."""
    return x.contiguous().view(torch.uint8)


def fill_table(
    pages: Tensor, packed: Tensor, ids: Tensor, count: Tensor, first: int, other: int, per_block: int, skip: int | None
) -> Check:
    from hisparse.integrations.vllm.step import _table

    copies = Copies()
    their_ids, their_count = copies.of(ids), copies.of(count)
    width = 1 + (ids.shape[1] - first) // other if other else int(packed.max()) if len(packed) else 0
    found, number = _table(pages, packed, max(width, 1), first, other, per_block, skip)
    their_count.copy_(number)
    for b, n in enumerate(number.tolist()):
        assert n <= ids.shape[1], f"request {b} has {n} records in a table of {ids.shape[1]}"
        their_ids[b, :n] = found[b, :n]
    return lambda _: copies.agree("fill_table")


def fill_step(
    layout: Any, selection: Any, pages: Tensor, ring: Tensor, lengths: Tensor, starts: Tensor, target: Any, width: int,
    most: int | None, each: int = 0,
) -> Check:  # fmt: skip
    from hisparse.integrations.vllm.step import make_step

    new = (starts[1:] - starts[:-1]).long()
    step = make_step(layout, selection, pages, ring, lengths.long() - new, new, width)
    step = step if most is None else step.limited(most, each)
    copies = Copies()
    for name in ("past", "lead", "packed", "dense_past", "kept_count", "row_count", "wanted"):
        _set(copies.of(getattr(target, name)), getattr(step, name))
    for name in ("dense", "new"):
        place, want = getattr(target, name), getattr(step, name)
        _set(copies.of(place.block), want.block)
        _set(copies.of(place.slot), want.slot)
    for name, counts in (("kept_table", step.kept_count), ("row_table", step.row_count)):
        table, want = copies.of(getattr(target, name)), getattr(step, name)
        for b, n in enumerate(counts.tolist()):
            table[b, :n] = want[b, :n]

    def check(_: None) -> None:
        for name in ("past", "lead", "packed", "dense_past", "kept_count", "row_count", "wanted"):
            same(f"fill_step: {name}", getattr(target, name), getattr(step, name))
        copies.agree("fill_step")

    return check


def merge_rows(records: Tensor, number: Tensor, claims: Tensor, shared: Tensor, width: int) -> Check:
    wants = [row[:n] for row, n in zip(records.tolist(), number.tolist(), strict=True)]
    once = {row for want in wants for row in want}
    assert len(once) <= width
    before = shared.tolist()

    def check(result: tuple[Tensor, Tensor, Tensor]) -> None:
        rows, total, rank = result
        assert int(total) == len(once)
        assert set(rows[0, : len(once)].tolist()) == once
        for b, want in enumerate(wants):
            for i, row in enumerate(want):
                owner = int(claims[row])
                assert int(rows[0, int(rank[owner])]) == row, f"entry {i} of request {b}"
        added = [sum(map(bool, wants)) - 1, sum(map(len, wants)) - len(once)]
        assert shared.tolist() == [x + y for x, y in zip(before, added, strict=True)]

    return check


def hand_out(slots: Tensor, rank: Tensor, records: Tensor, number: Tensor, claims: Tensor) -> Check:
    from hisparse.integrations.vllm import hot

    want, numbers = hot.hand_out(slots, rank, records, number, claims), number.tolist()

    def check(table: Tensor) -> None:
        for b, n in enumerate(numbers):
            same(f"slots of request {b}", table[b, :n], want[b, :n])

    return check


def locate(records: Tensor, number: Tensor, per_block: int, host_rows: int, rows: Tensor, queries: Tensor) -> Check:
    numbers = number.tolist()
    want = records // per_block * host_rows + records % per_block - (per_block - host_rows)
    counts = int(rows) + sum(numbers), int(queries) + sum(map(bool, numbers))

    def check(table: Tensor) -> None:
        for b, n in enumerate(numbers):
            same(f"rows of request {b}", table[b, :n], want[b, :n])
        assert (int(rows), int(queries)) == counts

    return check


def score(scorer: Any, values: Tensor, state: Any) -> Check:
    want, _ = scorer.score(values, state)
    return lambda result: None if Way.warming else within("importance", (result[0] - want).abs(), 1e-5)


def watch_all() -> None:
    """Compare every call from now on."""
    from hisparse.integrations.vllm import kernels, step_kernels
    from hisparse.tlif.scorer import TlifScorer

    for prepare in (renew, fill_table, fill_step):
        watch(step_kernels, prepare.__name__, prepare)
    for prepare in (merge_rows, hand_out, locate):
        watch(kernels, prepare.__name__, prepare)
    watch(TlifScorer, "score", score)
