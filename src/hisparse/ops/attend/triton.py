"""Attention of a chunk by PyTorch's fused attention, slice by slice over the packed past, joined by Triton kernels.

    out, lse = attention of the queries over one slice;   combine: weights exp(lse - max), renormalised

A slice of the past is unpacked into a work space of fixed size and attended to; its result joins what there is by its
log-sum-exp. The queries of a KV head's group are laid one after another, so that grouped heads need no copies of K and
V; FlashAttention 3, where there is one (`flash3`), takes grouped heads as they are. Pages on the host are brought over
on a second stream, one slice ahead of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hisparse.ops.attend import Packed, flash3, kernels, reference
from hisparse.ops.fetch import HostRows
from hisparse.ops.unpack import unpack_into
from hisparse.vtq.stats import ChannelStats

Library = Literal["flash3", "cudnn", "flash", "efficient", "plain"]
Part = tuple[Tensor, Tensor]
"""Result [H, M, D] of any float dtype, and its natural log-sum-exp float32 [H, M]."""

WORKSPACE = 1 << 26
"""Bytes of unpacked K and V at a time."""
EXPANDED = 1 << 29
"""Bytes of K and V at a time that are repeated for each query head."""
RUNS = 16
"""Up to how many runs of adjacent pages are copied one by one; more are gathered by a kernel."""
PLAN_QUERIES, PLAN_KEYS = 1024, 4096
"""cuDNN makes a plan for every shape, which takes longer than a slice does: it serves chunks and slices of a multiple
of these, and flash attention what is left."""
LOG2E = 1.4426950408889634


def choose_library(q: Tensor, chunk: int) -> Library:
    """What attends to a full slice, for queries like `q` [.., D] of a chunk of `chunk` tokens."""
    dim = q.shape[-1]
    if not q.is_cuda:
        return "plain"
    if q.dtype == torch.float32:
        return "efficient" if dim % 4 == 0 else "plain"
    if q.dtype not in (torch.float16, torch.bfloat16) or dim % 8 or dim > 256:
        return "plain"
    if flash3.serves(q):
        return "flash3"
    if dim in (64, 128) and chunk % PLAN_QUERIES == 0 and torch.cuda.get_device_capability(q.device)[0] >= 9:
        version = torch.backends.cudnn.version()
        if version is not None and version >= 90100:
            return "cudnn"
    return "flash"


def partial_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, library: Library) -> Part:
    """Attention of q [H, M, D] over all of k, v [H, N, D]; q of flash3 may have more heads, a multiple."""
    if library == "flash3":
        return flash3.attention(q, k, v, scaling, False)
    a, b, c = q[None], k[None], v[None]
    if library == "cudnn":
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(a, b, c, None, True, scale=scaling)[:2]
    elif library == "flash":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(a, b, c, scale=scaling)[:2]
    elif library == "efficient":
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(a, b, c, None, True, scale=scaling)[:2]
    else:
        return _plain(q, k, v, scaling, False)
    return out[0], lse.reshape(*lse.shape[1:3])[:, : q.shape[1]]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, library: Library) -> Part:
    """Attention of a chunk's q [Hq, T, D] over its own k, v [H, T, D], what is later hidden: [H, Hq / H * T, D], of
    flash3 [Hq, T, D]."""
    (q_heads, chunk, dim), heads = q.shape, k.shape[0]
    if library == "flash3":
        return flash3.attention(q, k, v, scaling, True)
    grouped = q.reshape(heads, -1, dim)
    if chunk == 1:
        return partial_attention(grouped, k, v, scaling, "flash" if library == "cudnn" else library)
    if library == "plain":
        return _plain(grouped, k, v, scaling, True)
    if library == "flash":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            q[None], k[None], v[None], is_causal=True, scale=scaling
        )[:2]
        return out[0].reshape(heads, -1, dim), lse[0, :, :chunk].reshape(heads, -1)
    # These want a KV head for every query head: some of them at a time, since a chunk may be a whole prompt.
    fused = torch.ops.aten
    call = (
        fused._scaled_dot_product_cudnn_attention
        if library == "cudnn"
        else fused._scaled_dot_product_efficient_attention
    )
    group = q_heads // heads
    step = max(1, EXPANDED // (2 * group * chunk * dim * k.element_size()))
    outs, logs = [], []
    for h in range(0, heads, step):
        some = slice(h, min(h + step, heads))
        keys, values = (x[some].repeat_interleave(group, 0)[None] for x in (k, v))
        queries = q[some.start * group : some.stop * group][None]
        out, lse = call(queries, keys, values, None, True, is_causal=True, scale=scaling)[:2]
        outs.append(out[0].reshape(-1, group * chunk, dim))
        logs.append(lse.reshape(*lse.shape[1:3])[:, :chunk].reshape(-1, group * chunk))
    return (outs[0], logs[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(logs))


def _plain(q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool) -> Part:
    """By matrix products, for dtypes and head sizes that no library kernel serves."""
    scores = (q.float() * scaling) @ k.float().mT
    if causal:
        chunk = k.shape[1]
        seen = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril_()
        scores.view(len(scores), -1, chunk, chunk).masked_fill_(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_() @ v.float(), lse


@dataclass(frozen=True)
class _Piece:
    """`count` pages of a part from the `first` on, unpacked to the work space's tokens from `at` on."""

    part: Packed
    first: int
    count: int
    at: int
    last: bool  # of its slice

    def ids(self) -> Tensor | None:
        chosen = self.part.ids
        return None if chosen is None else chosen[self.first : self.first + self.count]


def _lies_on(part: Packed, device: torch.device) -> bool:
    return isinstance(part.pages, Tensor) and part.pages.device == device


def _cut(packed: list[Packed], room: int, device: torch.device) -> list[_Piece]:
    """Pieces that fill slices of at most `room` tokens, those on the device first."""
    pieces: list[_Piece] = []
    at = 0
    for part in sorted(packed, key=lambda p: not _lies_on(p, device)):
        first, size = 0, part.fmt.tokens
        while first < part.count:
            if at + size > room:
                previous = pieces[-1]
                pieces[-1] = _Piece(previous.part, previous.first, previous.count, previous.at, True)
                at = 0
            count = min(part.count - first, (room - at) // size)
            pieces.append(_Piece(part, first, count, at, False))
            first, at = first + count, at + count * size
    return pieces


class _Host:
    """Brings pieces from the host in the order in which they are wanted, two buffers in turn."""

    def __init__(self, pieces: list[_Piece], device: torch.device) -> None:
        self.pieces, self.device = pieces, device
        self.started = 0
        self.ready: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self.buffers: list[Tensor] = []
        if not pieces:
            return
        size = max(p.count * p.part.fmt.page_bytes for p in pieces)
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in pieces[:2]]
        if device.type == "cuda":
            # Of high priority: its few programs start as soon as any multiprocessor has room.
            self.stream = _side_stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))
        for _ in pieces[:2]:
            self._start()

    def _start(self) -> None:
        piece = self.pieces[self.started]
        fmt, ids = piece.part.fmt, piece.ids()
        target = self.buffers[self.started % 2][: piece.count * fmt.page_bytes].view(-1, fmt.page_bytes)
        self.started += 1
        event = None
        if self.device.type != "cuda":
            chosen = torch.arange(piece.first, piece.first + piece.count) if ids is None else ids
            target.copy_(Packed(piece.part.pages, fmt, chosen).read(self.device))
        else:
            with torch.cuda.stream(self.stream):
                self._copy(piece, target)
                event = torch.cuda.Event()
                event.record(self.stream)
        self.ready.append((target, event))

    def _copy(self, piece: _Piece, target: Tensor) -> None:
        pages, ids = piece.part.pages, piece.ids()
        if isinstance(pages, Tensor) and (not pages.is_pinned() or pages.shape[1] % 16):
            chosen = pages[piece.first : piece.first + piece.count] if ids is None else pages[ids.cpu()]
            target.copy_(chosen)
            return
        source = pages if isinstance(pages, HostRows) else HostRows.of([pages], self.device)
        runs = [(piece.first, piece.count)] if ids is None else _runs(ids)
        if runs is None:
            assert ids is not None  # no ids are one run
            kernels.gather(source, ids.to(self.device, non_blocking=True), target)
            return
        at, size = 0, source.per_segment
        for first, count in runs:
            for begin in (first, *range((first // size + 1) * size, first + count, size)):
                end = min((begin // size + 1) * size, first + count)
                segment = source.segments[begin // size]
                target[at : at + end - begin].copy_(
                    segment[begin % size : begin % size + end - begin], non_blocking=True
                )
                at += end - begin

    def take(self) -> Tensor:
        """The next piece's pages; call `done` when the work that reads them is on its way."""
        target, event = self.ready.pop(0)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        return target

    def done(self) -> None:
        if self.started < len(self.pieces):
            if self.device.type == "cuda":
                self.stream.wait_stream(torch.cuda.current_stream(self.device))
            self._start()


_SIDE: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _SIDE:
        _SIDE[device] = torch.cuda.Stream(device, priority=-1)
    return _SIDE[device]


def _runs(ids: Tensor) -> list[tuple[int, int]] | None:
    """(first, count) of runs of adjacent pages, where the ids lie on the host and there are few runs."""
    if ids.is_cuda:
        return None
    edges = ((ids[1:] - ids[:-1]) != 1).nonzero().flatten() + 1
    if len(edges) >= RUNS:
        return None
    starts = [0, *edges.tolist()]
    ends = [*starts[1:], len(ids)]
    return [(int(ids[a]), b - a) for a, b in zip(starts, ends, strict=True)]


def _slices(
    packed: list[Packed], stats: ChannelStats | None, dense_k: Tensor, dense_v: Tensor, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """K and V [H, n, D] of the past, a slice at a time; a slice is gone when the next one is asked for."""
    dense = dense_k.shape[1]
    if not any(part.count for part in packed):
        if dense:
            yield dense_k, dense_v
        return
    heads, _, dim = dense_k.shape
    size = max(part.fmt.tokens for part in packed)
    room = max(WORKSPACE // (2 * heads * dim * dense_k.element_size()) // size * size, size)
    pieces = _cut(packed, room, device)
    host = _Host([p for p in pieces if not _lies_on(p.part, device)], device)
    tokens = pieces[-1].at + pieces[-1].count * pieces[-1].part.fmt.tokens
    single = all(not p.last for p in pieces)
    room = min(room, tokens) if single else room
    joined = dense if tokens + dense <= room or single else 0  # dense slots that the last slice has room for
    work = torch.empty((2, heads, room + (joined if single else 0), dim), dtype=dense_k.dtype, device=device)
    for i, piece in enumerate(pieces):
        fmt = piece.part.fmt
        here = slice(piece.at, piece.at + piece.count * fmt.tokens)
        stored, ids = piece.part.pages, piece.ids()
        k, v = work[0, :, here], work[1, :, here]
        if not isinstance(stored, Tensor) or stored.device != device:
            unpack_into(host.take(), stats, fmt, k, v)
            host.done()
        elif ids is not None:
            unpack_into(stored, stats, fmt, k, v, ids.to(device))
        else:
            unpack_into(stored[piece.first : piece.first + piece.count], stats, fmt, k, v)
        if piece.last or i == len(pieces) - 1:
            end = here.stop
            if i == len(pieces) - 1 and joined:
                work[0, :, end : end + dense] = dense_k
                work[1, :, end : end + dense] = dense_v
                end += dense
            yield work[0, :, :end], work[1, :, :end]
    if dense and not joined:
        yield dense_k, dense_v


def _shares(tokens: int, library: Library) -> list[tuple[int, int, Library]]:
    """Which library attends to which tokens of a slice."""
    even = tokens // PLAN_KEYS * PLAN_KEYS if library == "cudnn" else tokens
    shares: list[tuple[int, int, Library]] = [(0, even, library)] if even else []
    if even < tokens:
        shares.append((even, tokens, "flash"))
    return shares


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    packed: list[Packed],
    stats: ChannelStats | None,
    scaling: float,
    library: Library | None = None,
    causal: Library | None = None,
) -> Tensor:
    """See :func:`hisparse.ops.attend.attend`. library: what attends to the past; causal: to the chunk itself."""
    (q_heads, chunk, dim), heads = q.shape, k.shape[0]
    if q.dtype == torch.float64:
        return reference.attend(q, k, v, dense_k, dense_v, packed, stats, scaling)
    if q.stride(2) != 1:
        q = q.contiguous()  # the result is laid out as the queries are
    library = choose_library(q, chunk) if library is None else library
    # The past first: its first transfers start before anything is computed.
    grouped = q if library == "flash3" else q.reshape(heads, -1, dim)
    total: Part | None = None
    memory: Tensor | None = None
    for keys, values in _slices(packed, stats, dense_k, dense_v, q.device):
        for first, last, used in _shares(keys.shape[1], library):
            part = partial_attention(grouped, keys[:, first:last], values[:, first:last], scaling, used)
            if total is None:
                total = part
                continue
            if memory is None:
                memory = torch.empty(grouped.shape, dtype=torch.float32, device=q.device)
            total = kernels.merge(total, part, memory)
    if causal is None:
        causal = "flash" if library == "cudnn" else library
    own_out, own_lse = causal_attention(q, k, v, scaling, causal)
    if total is None:
        out = own_out.to(q.dtype)
    else:
        own = own_out.reshape(grouped.shape), own_lse.reshape(grouped.shape[:2])
        out, _ = kernels.merge(total, own, torch.empty_like(grouped))
    return out.reshape(q_heads, chunk, dim)


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
    """See :func:`hisparse.ops.attend.attend_recalled`: few queries with little each, so plain products will do."""
    return reference.attend_recalled(q, k, v, dense_k, dense_v, kept, recalled, stats, scaling)


def select_for_chunk(
    sample: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float, count: int
) -> Tensor:
    """See :func:`hisparse.ops.attend.select_for_chunk`; `sample` [Hq, S, D] are the sampled queries.

    Keys and queries meet in the sketches' basis: no key is rebuilt. Shares of attention do not change when the same
    vector is taken from all keys: less their mean, they fit float16. One pass of fused attention gives every query's
    log-sum-exp, with which a second pass over the keys adds up the shares of rows without ever storing a score.
    """
    heads, dim = stats.heads, stats.head_dim
    keys = kernels.coordinates(codes, scales)
    width = 3 * codes.shape[3]
    basis = stats.query_basis[..., :width]
    queries = (sample.reshape(heads, -1, dim).float() @ basis * (scaling * LOG2E)).half()
    queries = torch.nn.functional.pad(queries, (0, keys.shape[2] - width)).contiguous()
    library: Library = "flash" if keys.is_cuda else "plain"
    _, lse = partial_attention(queries, keys, keys, 1 / LOG2E, library)
    worth = kernels.row_worth(keys, queries, lse.contiguous() * LOG2E, scales.shape[2])
    return worth.topk(count, sorted=False).indices
