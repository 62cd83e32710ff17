"""Every operation of an engine against its reference, on the engine's own tensors.

`watch_all` wraps the twins: before a call the reference runs on copies, after it results are compared, and all memory
that the call may write is compared byte by byte, so that writing beyond shows as well. Tolerances are those of the
operations' own tests. A call that disagrees raises AssertionError, and is kept in `FAILED`.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from gpu_on_cpu import Way, nonsense, reference
from torch import Tensor

CHECKED: Counter[str] = Counter()
"""Calls compared, by operation."""
WORST: dict[str, float] = {}
"""Largest error of each operation, as a share of what is allowed."""
FAILED: list[str] = []
OWN = random.Random(0)
"""Numbers that leave the engine's own alone."""
ALIKE: dict[str, list[int]] = {"scales": [0, 0], "codes": [0, 0]}
"""Of all sketches: values that are the reference's, and all."""
DECODE = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
ATTEND = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PAGES = 2
"""Of more pages that are unpacked at once so many are, in Triton's interpreter; of more programs that pack one runs."""
HUGE = 1e30
WORTH = 6e-3
"""Relative error of a row's worth."""
Check = Callable[[Any], None]


def watch(module: ModuleType | type, name: str, prepare: Callable[..., Check]) -> None:
    """Compare calls of `module.name`: prepare(the call's arguments) gives what looks at the result."""
    call = getattr(module, name)

    @functools.wraps(call)
    def watched(*arguments: Any, **options: Any) -> Any:
        if Way.reference or Way.twins == "reference":
            return call(*arguments, **options)
        label = f"{module.__name__.removeprefix('hisparse.')}.{name}"
        with reference():
            check = prepare(*arguments, **options)
        result = call(*arguments, **options)
        try:
            with reference():
                check(result)
        except AssertionError as error:
            FAILED.append(f"{label}: {error}\n{_shapes(arguments)}")
            if "HISPARSE_KEEP" in os.environ:
                torch.save((label, arguments, options, result), os.environ["HISPARSE_KEEP"])
            raise AssertionError(FAILED[-1]) from error
        CHECKED[label] += 1
        return result

    setattr(module, name, watched)


def _shapes(arguments: tuple[Any, ...]) -> str:
    return ", ".join(
        f"{x.dtype} {list(x.shape)} strides {x.stride()}" if isinstance(x, Tensor) else str(x)[:300] for x in arguments
    )


def within(what: str, error: Tensor | float, allowed: Tensor | float) -> None:
    """Raise AssertionError unless each `error` is at most what is allowed."""
    share = torch.as_tensor(error, dtype=torch.float64) / torch.as_tensor(allowed, dtype=torch.float64)
    worst = float(share.nan_to_num(float("inf")).max()) if share.numel() else 0.0
    WORST[what] = max(WORST.get(what, 0.0), worst)
    assert worst <= 1, f"{what}: {worst:.3g} times the error that is allowed"


def near(what: str, found: Tensor, want: Tensor, tolerance: float) -> None:
    """Both relative and absolute; all are numbers, but for what an engine warms up with."""
    if Way.warming:
        good = want.isfinite()
        found, want = found[good], want[good]
    within(what, (found.double() - want).abs(), tolerance * (1 + want.abs()))


def same(what: str, found: Tensor, want: Tensor) -> None:
    if torch.equal(found, want):
        return
    if found.shape != want.shape:
        raise AssertionError(f"{what}: shape {list(found.shape)}, not {list(want.shape)}")
    at = (found != want).nonzero()
    there = tuple(at[0].tolist())
    raise AssertionError(f"{what}: {len(at)} of {found.numel()} differ, first {there}: {found[there]}, {want[there]}")


class Copies:
    """Tensors on copies of their storages: those that share memory still do."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages[storage.data_ptr()] = whole, whole.clone()
        copy = self.storages[storage.data_ptr()][1]
        found = torch.empty(0, dtype=x.dtype)
        return found.set_(copy.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    def agree(self, what: str) -> None:
        """All of the storages, what no tensor covers included, are as their copies are by now."""
        for found, want in self.storages.values():
            same(f"{what}: bytes of memory", found, want)


# -- attention of single tokens ----------------------------------------------------------------------------------------


def decode(
    q: Tensor, dense_k: Tensor, dense_v: Tensor, dense_len: Tensor, kept: Any, recalled: Any, stats: Any,
    scaling: float, extra_logit: Any, extra_value: Any, page_mass: bool, split: Any, *tuning: Any, **more: Any,
) -> Check:  # fmt: skip
    from hisparse.ops.decode import reference as plain

    dense = dense_k.double(), dense_v.double()
    want = plain.decode_attention(
        q.double(), *dense, dense_len, kept, recalled, stats, scaling, extra_logit, extra_value, page_mass, split
    )  # fmt: skip
    absolute = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(q.dtype, 1e-4)

    def check(result: Any) -> None:
        out = result.out.double()
        assert bool(out.isfinite().all()), "attention is not a number"
        error = (out - want.out).norm(dim=-1) / want.out.norm(dim=-1).clamp_min(1e-6)
        within("decode", error, DECODE[q.dtype])
        there = want.lse.isfinite()
        same("log-sum-exps", result.lse.isfinite(), there)
        within("decode's sums", (result.lse - want.lse)[there].abs(), absolute + 1e-5 * want.lse[there].abs())
        if (given := more.get("out")) is not None:
            assert result.out is given, "the result is not where it was wanted"

    return check


def best_of(what: str, worth: Tensor, chosen: Tensor, allowed: float) -> None:
    """`chosen` numbers of `worth`, each once, are worth about as much together as any so many."""
    assert len(chosen.unique()) == len(chosen), f"{what}: a row is chosen twice"
    most = worth.double().topk(len(chosen)).values.sum()
    short = 1 - worth.double()[chosen].sum() / most.clamp_min(1e-30)
    within(what, float(short) if len(chosen) else 0.0, 1 - (1 - allowed) / (1 + allowed))


def scan(
    q: Tensor, codes: Tensor, scales: Tensor, table: Tensor, count: Tensor, stats: Any, scaling: float, bits: int,
    budget: int, wanted: Tensor | None, *tuning: Any,
) -> Check:  # fmt: skip
    from hisparse.ops.scan import reference as plain

    worth = plain.scan_rows(q, codes, scales, table, count, stats, scaling, bits)
    tables, counts = table.tolist(), count.tolist()
    limits = [budget] * len(q) if wanted is None else wanted.tolist()

    def check(chosen: Any) -> None:
        for b, (used, limit) in enumerate(zip(counts, limits, strict=True)):
            number = max(0, min(used, budget, limit))
            assert int(chosen.number[b]) == number, f"{chosen.number.tolist()} rows chosen, not {number}, request {b}"
            assert not bool(chosen.rows[b, number:].any()), "what lies beyond the number is not 0"
            where = {row: i for i, row in enumerate(tables[b][:used])}
            assert len(where) == used, "the table has a row twice"
            rows = chosen.rows[b, :number].tolist()
            assert where.keys() >= set(rows), f"request {b}: rows that it does not have"
            best_of("scan", worth[b, :used], torch.tensor([where[row] for row in rows], dtype=torch.int64), WORTH)

    return check


def select_rows(scores: Tensor, row_size: int, count: int) -> Check:
    heads, chunk, tokens = scores.shape
    share = scores.double().softmax(-1).view(heads, chunk, tokens // row_size, row_size).sum(-1)
    worth = share.sqrt().sum(0).amax(0)

    def check(rows: Tensor) -> None:
        assert len(rows) == min(count, len(worth))
        best_of("select_rows", worth, rows, 1e-5)

    return check


def select_for_chunk(sample: Tensor, codes: Tensor, scales: Tensor, stats: Any, scaling: float, count: int) -> Check:
    from hisparse.ops.sketch import reference as plain

    rows, _, row_size = scales.shape
    share = plain.score_sketch(sample, codes, scales, stats, scaling).softmax(-1)
    worth = share.view(*share.shape[:2], rows, row_size).sum(-1).sqrt().sum((0, 1))

    def check(chosen: Tensor) -> None:
        assert len(chosen) == min(count, rows)
        best_of("select_for_chunk", worth, chosen, WORTH)

    return check


# -- sketches and pages ------------------------------------------------------------------------------------------------


def score_sketch(queries: Tensor, codes: Tensor, scales: Tensor, stats: Any, scaling: float) -> Check:
    from hisparse.ops.sketch import reference as plain

    want = plain.score_sketch(queries, codes, scales, stats, scaling)
    return lambda found: within("score_sketch", float((found - want).norm()), 1e-3 * float(want.norm()) + 1e-30)


def sketch_tokens(
    keys: Tensor, tokens: Tensor, stats: Any, bits: int, codes: Tensor, scales: Tensor, places: Tensor
) -> Check:
    from hisparse.ops.sketch import reference as plain

    copies = Copies()
    their_codes, their_scales = copies.of(codes), copies.of(scales)
    good = bool(_fit(keys[tokens]).all())
    plain.sketch_tokens(keys, tokens, stats, bits, their_codes, their_scales, places)

    def check(_: None) -> None:
        heads, row_size = stats.heads, tokens.shape[1]
        if good:
            mine, theirs = (x[places].view(len(places), heads, row_size) for x in (scales, their_scales))
            within("sketch's scales", (mine.int() - theirs.int()).abs(), 1)
            alike = mine == theirs
            a, b = (x[places].view(len(places), heads, row_size, -1)[alike] for x in (codes, their_codes))
            for name, equal in (("scales", alike), ("codes", a == b)):
                ALIKE[name][0] += int(equal.sum())
                ALIKE[name][1] += equal.numel()
        their_codes[places], their_scales[places] = codes[places], scales[places]
        copies.agree("sketch_tokens")

    return check


def sketches_agree() -> None:
    """At the end: as few codes differ as float32 cannot tell."""
    for name, least in (("scales", 0.95), ("codes", 0.995)):
        alike, every = ALIKE[name]
        assert alike >= least * every, f"sketches: {alike} of {every} {name} are the reference's"


def _fit(x: Tensor) -> Tensor:
    """bool [n]: which of x [n, ...] can be packed. An engine warms up with anything."""
    return (x.abs() < HUGE).flatten(1).all(1)


def pack_tokens(
    k: Tensor, v: Tensor, tokens: Tensor, stats: Any, fmt: Any, split: str, threshold: float, faults: Tensor,
    out: Tensor, places: Tensor,
) -> Check:  # fmt: skip
    from hisparse.ops.pack import reference as plain

    copies = Copies()
    theirs, before = copies.of(out), int(faults)
    bad = ~(_fit(k[tokens]) & _fit(v[tokens]))
    if Way.warming:
        k, v = (torch.where(x.abs() < HUGE, x, 0) for x in (k, v))
    plain.pack_tokens(k, v, tokens, stats, fmt, split, threshold, faults.clone(), theirs, places)

    def check(_: None) -> None:
        assert Way.warming or (int(faults) > before) == bool(bad.any()), f"{int(faults) - before} faults counted"
        theirs[places[bad]] = out[places[bad]]  # they mean nothing
        copies.agree("pack_tokens")

    return check


def pack_pages(
    k: Tensor, v: Tensor, stats: Any, fmt: Any, split: str, threshold: float, faults: Tensor | None = None
) -> Check:
    """Of Triton's twin, which packs some pages only."""
    from hisparse.ops.pack import reference as plain
    from hisparse.ops.pack.triton import PAGES_EACH

    bad = ~(_fit(k) & _fit(v))
    good = (torch.where(x.abs() < HUGE, x, 0) for x in (k, v))
    want = plain.pack_pages(*good, stats, fmt, split, threshold)
    few = len(k) > PAGES_EACH and not bool(bad.any())
    Way.pages = [OWN.randrange(-(-len(k) // PAGES_EACH))] if few else None

    def check(found: Tensor) -> None:
        if Way.pages is not None:
            others = ~torch.isin(torch.arange(len(k)) // PAGES_EACH, torch.tensor(Way.pages))
            found[others] = want[others]
        Way.pages = None
        same("pack_pages", found[~bad], want[~bad])

    return check


def unpack_into(pages: Tensor, stats: Any, fmt: Any, k: Tensor, v: Tensor, ids: Tensor | None) -> Check:
    from hisparse.ops.unpack import reference as plain

    copies = Copies()
    theirs = copies.of(k), copies.of(v)
    plain.unpack_into(pages, stats, fmt, *theirs, ids)
    count = len(pages) if ids is None else len(ids)
    if count > PAGES and stats is not None:
        Way.pages = sorted({0, count - 1, *(OWN.randrange(count) for _ in range(PAGES - 2))})
        for mine, want in zip((k, v), theirs, strict=True):
            mine.copy_(want)
            for page in Way.pages:
                nonsense(mine[:, page * fmt.tokens : (page + 1) * fmt.tokens])

    def check(_: None) -> None:
        Way.pages = None
        if stats is not None:
            level = max(float(stats.k_mean.abs().max()), float(stats.v_mean.abs().max()))
            for mine, want in zip((k, v), theirs, strict=True):
                size = want.float().abs()
                rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(k.dtype, 0.0) * size
                good = want.isfinite()
                error = (mine.float() - want.float()).abs()[good]
                within("unpack", error, (2**-20 * (level + size.nan_to_num(0.0).amax()) + rounding)[good])
        for mine, want in zip((k, v), theirs, strict=True):
            want.copy_(mine)
        copies.agree("unpack_into")

    return check


# -- rows of the host --------------------------------------------------------------------------------------------------


def _book(hot: Any, copies: Copies) -> Any:
    from hisparse.ops.fetch import HotBuffer

    fields = (hot.buffer, hot.owner, hot.stamp, hot.slot_of, hot.first, hot.clock, hot.counters)
    return HotBuffer(*(copies.of(x) for x in fields), hot.sizes)


def _fetched(hot: Any, source: Any, theirs: Any, copies: Copies) -> None:
    """Buffer and books are as the reference leaves them, and every slot holds its row as it is on the host now."""
    from hisparse.ops.fetch.reference import _read

    slots = (hot.owner >= 0).nonzero().flatten()
    same("rows in the hot buffer", hot.buffer[slots], _read(source, hot.owner[slots]))
    hot.check()
    copies.agree("fetch")


def fetch_rows(hot: Any, source: Any, rows: Tensor, number: Tensor, early: bool = False) -> Check:
    from hisparse.ops.fetch import reference as plain

    copies = Copies()
    theirs = _book(hot, copies)
    want = plain.fetch_rows(theirs, source, rows, number)
    numbers = number.clone()

    def check(table: Tensor) -> None:
        for b, n in enumerate(numbers.tolist()):
            same("slots", table[b, :n], want[b, :n])
        _fetched(hot, source, theirs, copies)

    return check


def fetch_shared(hot: Any, source: Any, rows: Tensor, number: Tensor, shared: Tensor, early: bool = False) -> Check:
    from hisparse.ops.fetch import reference as plain

    copies = Copies()
    theirs = _book(hot, copies)
    wants = [row[:n] for row, n in zip(rows.tolist(), number.tolist(), strict=True)]
    once = list(dict.fromkeys(row for want in wants for row in want))
    assert len(once) <= hot.sizes[0], f"a step wants {len(once)} rows of a buffer of {hot.sizes[0]}"
    merged = torch.tensor([once], dtype=torch.int32).view(1, len(once))
    slots = plain.fetch_rows(theirs, source, merged, torch.tensor([len(once)], dtype=torch.int32))
    slot = dict(zip(once, slots[0].tolist(), strict=True))
    counted = copies.of(shared)
    counted += torch.tensor([sum(map(bool, wants)) - 1, sum(map(len, wants)) - len(once)])

    def check(table: Tensor) -> None:
        for b, want in enumerate(wants):
            assert table[b, : len(want)].tolist() == [slot[row] for row in want], f"slots of request {b}"
        _fetched(hot, source, theirs, copies)

    return check


def forget_rows(hot: Any, rows: Tensor) -> Check:
    copies = Copies()
    theirs = _book(hot, copies)
    gone = theirs.slot_of[rows.long()]
    theirs.slot_of[rows.long()] = -1
    theirs.owner[gone[gone >= 0].long()] = -1

    def check(_: None) -> None:
        copies.agree("forget_rows")
        hot.check()

    return check


def store_rows(source: Any, rows: Tensor, pages: Tensor) -> Check:
    copies = Copies()
    theirs = [copies.of(segment) for segment in source.segments]
    for row, page in zip(rows.tolist(), pages, strict=True):
        theirs[row // source.per_segment][row % source.per_segment] = page
    return lambda _: copies.agree("store_rows")


def gather_rows(source: Any, rows: Tensor, number: Tensor | None) -> Check:
    from hisparse.ops.fetch.reference import _read

    assert number is None
    want = _read(source, rows.flatten())
    return lambda found: same("gather_rows", found, want)


def gather(source: Any, ids: Tensor, out: Tensor, *programs: int) -> Check:
    from hisparse.ops.fetch.reference import _read

    copies = Copies()
    copies.of(out).copy_(_read(source, ids))
    return lambda _: copies.agree("gather")


# -- attention of chunks -----------------------------------------------------------------------------------------------


def attend(
    q: Tensor, k: Tensor, v: Tensor, dense_k: Tensor, dense_v: Tensor, packed: list[Any], stats: Any, scaling: float,
    *libraries: Any,
) -> Check:  # fmt: skip
    from hisparse.ops.attend import reference as plain

    parts = [*plain._unpacked(packed, stats, k.dtype, q.device), (dense_k, dense_v), (k, v)]
    group, chunk = q.shape[0] // k.shape[0], q.shape[1]
    keys, values = (torch.cat([part[i] for part in parts], 1).double().repeat_interleave(group, 0) for i in (0, 1))
    scores = q.double() @ keys.mT * scaling
    later = torch.ones(chunk, chunk, dtype=torch.bool).triu_(1)
    scores[..., -chunk:].masked_fill_(later, float("-inf"))
    want = scores.softmax(-1) @ values

    def check(found: Tensor) -> None:
        assert found.dtype == q.dtype
        near("attend", found, want, ATTEND[q.dtype])

    return check


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor) -> Check:
    lse = torch.logaddexp(a[1].double(), b[1].double())
    want = sum(x.double() * (log.double() - lse).exp()[..., None] for x, log in (a, b))

    def check(found: tuple[Tensor, Tensor]) -> None:
        assert found[0] is out
        near("merge", out, want, ATTEND[out.dtype])
        near("merge's sums", found[1], lse, 1e-4)

    return check


def watch_all() -> None:
    """Compare every call of the engines of this process from now on."""
    import checked_steps

    from hisparse.ops.attend import kernels, triton
    from hisparse.ops.decode import cuda as decode_cuda
    from hisparse.ops.decode import triton as decode_triton
    from hisparse.ops.fetch import cuda as fetch_cuda
    from hisparse.ops.fetch import triton as fetch_triton
    from hisparse.ops.pack import cuda as pack_cuda
    from hisparse.ops.pack import triton as pack_triton
    from hisparse.ops.scan import cuda as scan_cuda
    from hisparse.ops.scan import triton as scan_triton
    from hisparse.ops.select import triton as select_triton
    from hisparse.ops.sketch import triton as sketch_triton
    from hisparse.ops.unpack import triton as unpack_triton

    for module in (decode_cuda, decode_triton):
        watch(module, "decode_attention", decode)
    for module in (scan_cuda, scan_triton):
        watch(module, "scan_and_select", scan)
    for module in (pack_cuda, pack_triton):
        watch(module, "pack_tokens", pack_tokens)
    watch(pack_triton, "pack_pages", pack_pages)
    watch(fetch_cuda, "fetch_shared", fetch_shared)
    for module in (fetch_triton, fetch_cuda):
        for prepare in (fetch_rows, forget_rows, store_rows, gather_rows):
            watch(module, prepare.__name__, prepare)
    watch(select_triton, "select_rows", select_rows)
    watch(sketch_triton, "sketch_tokens", sketch_tokens)
    watch(sketch_triton, "score_sketch", score_sketch)
    watch(unpack_triton, "unpack_into", unpack_into)
    watch(triton, "attend", attend)
    watch(triton, "select_for_chunk", select_for_chunk)
    watch(kernels, "merge", merge)
    watch(kernels, "gather", gather)
    checked_steps.watch_all()
