"""Sequences and page ids: every position in one place, whatever the pieces in which it arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hisparse.cache.geometry import SINKS, Geometry
from hisparse.cache.pools import PageIds, Pool
from hisparse.cache.sequence import Commit, Sequence
from hisparse.config import HiSparseConfig
from hisparse.errors import HiSparseError

EVICT = ["host", "drop", "none"]


def geometry(page: int, row: int, prefix: int, evict: str) -> Geometry:
    config = HiSparseConfig(
        vtq={"page_size": page}, selection={"row_size": row}, tlif={"prefix_length": prefix}, evict=evict
    )
    return Geometry(2, 2, 16, torch.float32, config)


def sequence(page: int = 8, row: int = 4, prefix: int = 128, evict: str = "host") -> Sequence:
    return Sequence(PageIds(), PageIds(), page, row, prefix, evict)


def by_parity(importance: np.ndarray) -> np.ndarray:
    """A decision that depends on the token alone (its importance holds its position)."""
    return importance.astype(np.int64) * 2654435761 % 7 < 3


def everything(importance: np.ndarray) -> np.ndarray:
    return np.ones(len(importance), bool)


@dataclass
class Mirror:
    """What a layer does with commits, token by token in Python: which position lies in which slot, page and row."""

    dense: list[int] = field(default_factory=list)
    pages: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[int, list[int]] = field(default_factory=dict)
    length: int = 0

    def apply(self, commit: Commit) -> None:
        source = self.dense + list(range(self.length, self.length + commit.chunk))
        self.length += commit.chunk
        for store, ids, index in (
            (self.pages, commit.page_ids, commit.page_index),
            (self.rows, commit.row_ids, commit.row_index),
        ):
            for page, slots in zip(ids.tolist(), index.tolist(), strict=True):
                assert page not in store
                store[page] = [source[i] for i in slots]
        if commit.appends_only:
            assert commit.remain.tolist() == list(range(len(source)))
        self.dense = [source[i] for i in commit.remain.tolist()]


def feed(s: Sequence, chunks: list[int], decide: Callable[[np.ndarray], np.ndarray]) -> Mirror:
    mirror = Mirror()
    for chunk in chunks:
        commit = s.extend(np.arange(s.length, s.length + chunk, dtype=np.float32), decide)
        mirror.apply(commit)
        s.check()
        slots = geometry(s.page_size, s.row_size, s.prefix_length, s.evict).slots
        assert len(s.dense) <= slots
        tail = range(max(0, s.length - s.prefix_length), s.length)
        assert {*range(min(SINKS, s.length)), *tail} <= set(s.dense.tolist())
    return mirror


chunkings = st.lists(st.one_of(st.just(1), st.integers(1, 12), st.integers(1, 90)), min_size=1, max_size=30)
sizes = {
    "page": st.sampled_from([1, 2, 3, 8]),
    "row": st.sampled_from([1, 3, 4]),
    "prefix": st.integers(1, 40),
    "evict": st.sampled_from(EVICT),
}


@settings(max_examples=80, deadline=None)
@given(chunks=chunkings, **sizes)
def test_every_position_is_in_exactly_one_place(
    chunks: list[int], page: int, row: int, prefix: int, evict: str
) -> None:
    s = sequence(page, row, prefix, evict)
    mirror = feed(s, chunks, everything if evict == "none" else by_parity)
    dense, kept, aside = s.positions()
    assert mirror.dense == dense.tolist()
    assert [mirror.pages[i] for i in s.pages] == kept.reshape(-1, page).tolist()
    assert [mirror.rows[i] for i in s.rows] == aside.reshape(-1, row).tolist()
    held = sorted([*dense.tolist(), *kept.tolist(), *aside.tolist()])
    total = sum(chunks)
    left_tail = np.arange(SINKS, max(SINKS, total - prefix), dtype=np.float32)
    assert s.length == total
    assert s.graduated == len(left_tail)
    if evict == "none":
        assert held == list(range(total))
        assert not s.rows
        assert s.kept_total == len(left_tail)
    else:
        keep = by_parity(left_tail)
        assert s.kept_total == int(keep.sum())
        assert set(kept.tolist()) <= set(left_tail[keep].astype(int).tolist())
        assert set(aside.tolist()) <= set(left_tail[~keep].astype(int).tolist())
        if evict == "drop":
            assert s.dropped == int((~keep).sum())
            assert not s.rows
            assert held == sorted(set(range(total)) - set(left_tail[~keep].astype(int).tolist()))
        else:
            assert held == list(range(total))


@settings(max_examples=60, deadline=None)
@given(chunks=chunkings, again=st.data(), **sizes)
def test_any_pieces_give_the_same_places(
    chunks: list[int], again: st.DataObject, page: int, row: int, prefix: int, evict: str
) -> None:
    total = sum(chunks)
    cuts = sorted(again.draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=20)) if total > 1 else [])
    other = np.diff([0, *cuts, total]).tolist()
    decide = everything if evict == "none" else by_parity
    a, b = sequence(page, row, prefix, evict), sequence(page, row, prefix, evict)
    feed(a, chunks, decide)
    feed(b, other, decide)
    for mine, theirs in zip(a.positions(), b.positions(), strict=True):
        assert mine.tolist() == theirs.tolist()
    assert (a.kept_total, a.graduated, a.dropped) == (b.kept_total, b.graduated, b.dropped)


def test_one_token_at_a_time_equals_one_piece() -> None:
    for evict in EVICT:
        decide = everything if evict == "none" else by_parity
        a, b = sequence(evict=evict), sequence(evict=evict)
        feed(a, [1] * 300, decide)
        feed(b, [300], decide)
        for mine, theirs in zip(a.positions(), b.positions(), strict=True):
            assert mine.tolist() == theirs.tolist()


def test_decisions_are_asked_once_a_token_in_order() -> None:
    asked: list[float] = []

    def decide(importance: np.ndarray) -> np.ndarray:
        asked.extend(importance.tolist())
        return by_parity(importance)

    feed(sequence(prefix=10), [1, 7, 30, 1, 1, 60, 2], decide)
    assert asked == list(range(SINKS, 102 - 10))


def test_sequences_of_a_batch_share_ids_without_sharing_pages() -> None:
    page_ids, row_ids = PageIds(), PageIds()
    batch = [Sequence(page_ids, row_ids, 8, 4, 16, "host") for _ in range(3)]
    mirrors = [Mirror() for _ in batch]
    for chunks in ((50, 90, 7), (1, 1, 1), (20, 33, 64)):
        for s, mirror, chunk in zip(batch, mirrors, chunks, strict=True):
            mirror.apply(s.extend(np.arange(s.length, s.length + chunk, dtype=np.float32), by_parity))
    for name in ("pages", "rows"):
        owned = [i for s in batch for i in getattr(s, name)]
        assert len(set(owned)) == len(owned)
    assert page_ids.in_use == sum(len(s.pages) for s in batch)
    assert row_ids.in_use == sum(len(s.rows) for s in batch)


@pytest.mark.parametrize("damage", ["lost", "twice", "page", "count"])
def test_check_notices_damage(damage: str) -> None:
    s = sequence(prefix=10)
    feed(s, [200], by_parity)
    assert s.check().startswith("200 tokens = ")
    if damage == "lost":
        s.dense = s.dense[1:]
    elif damage == "twice":
        s.dense[0] = s.kept[0][0]
    elif damage == "page":
        s.pages[1] = s.pages[0]
    else:
        s.rows.append(999)
    with pytest.raises(AssertionError, match=r"sequence does not add up: 200 tokens = \d+ dense \+ \d+ kept in"):
        s.check()


class PageIdsMachine(RuleBasedStateMachine):
    """Taking and releasing in any order: nobody gets a page that somebody holds."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = PageIds(step=2)
        self.held: list[int] = []
        self.most = 0

    @rule(count=st.integers(0, 40))
    def take(self, count: int) -> None:
        got = self.ids.take(count)
        assert len(got) == count
        assert not set(got) & set(self.held)
        self.held += got
        self.most = max(self.most, len(self.held))
        assert len(set(self.held)) == len(self.held)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            gone = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=10))
            self.ids.release(gone)
            self.held = [i for i in self.held if i not in gone]

    @rule(data=st.data())
    def release_what_is_not_held(self, data: st.DataObject) -> None:
        stranger = data.draw(st.integers(-5, 2 * self.ids.made + 5).filter(lambda i: i not in self.held))
        with pytest.raises(HiSparseError, match=f"page {stranger} is not in use"):
            self.ids.release([stranger])

    @invariant()
    def counts_agree(self) -> None:
        assert self.ids.in_use == len(self.held)
        assert self.ids.made == self.most  # released ids are used again before new ones are made
        assert self.ids.capacity >= self.ids.made
        assert self.ids.capacity - self.ids.made <= self.ids.slack(self.ids.made)
        assert all(0 <= i < self.ids.capacity for i in self.held)


TestPageIds = PageIdsMachine.TestCase
TestPageIds.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_double_release_is_refused_and_changes_nothing() -> None:
    ids = PageIds()
    a, b, c = ids.take(3)
    ids.release([b])
    for bad in ([b], [a, a], [c, 3], [c, -1], [c, b]):
        with pytest.raises(HiSparseError, match=r"is not in use \(3 made, 1 free\)"):
            ids.release(bad)
        assert ids.in_use == 2
    assert ids.take(2) == [b, 3]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 33))
def test_a_pool_keeps_what_was_written_while_it_grows(counts: list[int], page_bytes: int) -> None:
    ids, cpu = PageIds(), torch.device("cpu")
    pool, written = Pool(page_bytes, cpu), {}
    make = torch.Generator().manual_seed(page_bytes)
    for count in counts:
        taken = ids.take(count)
        pool.ensure(ids.capacity)
        pages = torch.randint(0, 256, (count, page_bytes), dtype=torch.uint8, generator=make)
        pool.write(torch.tensor(taken), pages)
        written.update(zip(taken, pages, strict=True))
        assert pool.nbytes == ids.capacity * page_bytes == pool.data.untyped_storage().nbytes()
    order = torch.tensor(sorted(written, key=lambda i: -i))
    assert torch.equal(pool.read(order, cpu), torch.stack([written[i] for i in order.tolist()]))
    assert pool.read(order[:0], cpu).shape == (0, page_bytes)
