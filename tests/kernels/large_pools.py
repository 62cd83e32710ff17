"""Pools of more than 2**33 bytes of which a few lines are used, and the same work on small ones.

An address computed in 32 bits, be it in bytes or in words of up to four bytes, is that of other memory, all of which is
there: what is read is something else, what is written is missing, and the process goes on.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.ops.decode import DecodeResult, Pages
from hisparse.ops.fetch import HostRows, HotBuffer
from hisparse.ops.pack import reference as pack_plain
from hisparse.ops.scan import Chosen
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

sys.path.append(str(Path(__file__).parents[1] / "decode"))
from decode_oracle import make_case as make_decode

BEFORE, SIZE = 1 << 33, (1 << 33) + (1 << 28)
"""Bytes in front of a pool, where offsets end that turned negative, and bytes of the pool itself."""
BORDERS = [2**31, 2**32, 2**33]
"""Offsets in bytes at which 31 and 32 bits end, in bytes, words of two and words of four."""
NONSENSE = 0xA5


def large_pool(line: int, device: torch.device) -> Tensor:
    """uint8 [lines, line]. On the CPU it is zero, and memory that is not touched takes none."""
    lines = SIZE // line
    if device.type == "cuda":
        try:
            memory = torch.empty(BEFORE + SIZE, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            pytest.skip(f"needs {(BEFORE + SIZE) >> 30} GiB of free GPU memory")
        return memory[BEFORE : BEFORE + lines * line].view(lines, line)
    if sys.platform != "linux":
        pytest.skip("needs Linux: memory that is reserved and not there")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        reserved = mmap.mmap(-1, BEFORE + SIZE, flags=flags)
    except OSError as error:
        pytest.skip(f"the machine refuses {(BEFORE + SIZE) >> 30} GiB of virtual memory: {error}")
    reserved.madvise(mmap.MADV_NOHUGEPAGE)  # else a line takes two megabytes
    return torch.frombuffer(reserved, dtype=torch.uint8, count=lines * line, offset=BEFORE).view(lines, line)


def far_lines(number: int, line: int, seed: int = 0) -> Tensor:
    """int64 [number], each once and in no order: the first lines of a pool, the last, and those at the borders."""
    span = -(-number // (len(BORDERS) + 2)) + 1
    firsts = [0, *(border // line - span // 2 for border in BORDERS), SIZE // line - span]
    lines = torch.tensor([first + i for i in range(span) for first in firsts])
    return lines[:number][torch.randperm(number, generator=torch.Generator().manual_seed(seed))]


def spread(table: Tensor, count: Tensor, small: Tensor, line: int) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """The lines of `small` uint8 [n, bytes] that a table of ids uses, in a large pool: the pool, the table for it, and
    how to find where a line went."""
    used = torch.cat([row[:n] for row, n in zip(table, count.tolist(), strict=True)]).long()
    lines = far_lines(len(used), line).to(small.device)
    pool = large_pool(line, small.device)
    pool[lines, : small.shape[1]] = small[used]
    place = torch.zeros(len(small), dtype=torch.int64, device=small.device)
    place[used] = lines
    large, start = table.clone(), 0
    for row, n in zip(large, count.tolist(), strict=True):
        row[:n] = lines[start : start + n]
        start += n
    return pool, large, lambda ids: place[ids.long()]


# ---- decode attention ------------------------------------------------------------------------------------------------


def check_decode(attention: Callable[..., DecodeResult], device: torch.device, raw: bool = False) -> None:
    """attention: of the arguments of `decode_attention` up to the scaling."""
    case = make_decode(
        torch.bfloat16, 2, 8, 128, 8, group=64, split="rope", counts=(17, 5), rows=(6, 9), lengths=(3, 0), raw=raw
    )
    assert case.kept is not None
    assert case.recalled is not None
    near, far = [], []
    for pages in (case.kept, case.recalled):
        pool, table, count = pages.pool.to(device), pages.table.to(device), pages.count.to(device)
        near.append(Pages(pool, table, count, pages.fmt))
        pool, table, _ = spread(table, count, pool, pages.fmt.page_bytes)
        far.append(Pages(pool, table, count, pages.fmt))
    dense = [x.to(device) for x in (case.q, case.dense_k, case.dense_v, case.dense_len)]
    stats = case.stats.to(device)
    want, found = (attention(*dense, *pages, stats, case.scaling) for pages in (near, far))
    assert want.out.isfinite().all()
    assert torch.equal(found.out, want.out)
    assert torch.equal(found.lse, want.lse)


# ---- scan and selection ----------------------------------------------------------------------------------------------


def check_scan(twin: Any, case: tuple[Any, ...], tuning: Any) -> None:
    """case: of two bits, as `test_scan_kernels.make_case` gives it. Codes and scales are columns of one pool."""
    q, codes, scales, table, count, stats = case
    inner, outer = codes.shape[1], codes.shape[1] + scales.shape[1]
    pool = torch.full((len(codes), -(-outer // 16) * 16 + 16), 255, dtype=torch.uint8, device=codes.device)
    pool[:, :inner], pool[:, inner:outer] = codes, scales
    large, far, place = spread(table, count, pool, pool.shape[1])
    worths: list[Tensor] = []
    choices: list[Chosen] = []
    for memory, ids in ((pool, table), (large, far)):
        given = (q, memory[:, :inner], memory[:, inner:outer], ids, count, stats, 0.05, 2)
        worths.append(twin.scan_rows(*given, tuning))
        choices.append(twin.scan_and_select(*given, 21, None, tuning))
    assert torch.equal(*worths)
    assert choices[0].number.tolist() == choices[1].number.tolist() == [min(n, 21) for n in count.tolist()]
    for b, n in enumerate(choices[0].number.tolist()):
        assert set(choices[1].rows[b, :n].tolist()) == set(place(choices[0].rows[b, :n]).tolist())


# ---- rows ------------------------------------------------------------------------------------------------------------

ROW_BYTES = 9232
WANTED = [[0, 5, 7, 11, 3], [5, 20, 21, 1, 2], [39, 38, 37, 0, 36], [20, 38, 12, 13, 39], [1, 2, 3, 4, 5]]


def make_rows(device: torch.device) -> tuple[HostRows, HostRows, Tensor]:
    """The same 40 rows in a small source and in one large segment, and their numbers in that."""
    rows = torch.randint(0, 256, (40, ROW_BYTES), generator=torch.Generator().manual_seed(3)).to(torch.uint8).to(device)
    lines, pool = far_lines(40, ROW_BYTES).to(device), large_pool(ROW_BYTES, device)
    pool[lines] = rows
    # A GPU reads its own memory as it reads pinned memory of the host, at the address.
    return HostRows.of([rows], device), HostRows.of([pool], device), lines.int()


def hot_window(begin: int, size: int, slots: int, rows: int, buffer: Tensor) -> HotBuffer:
    """One sequence's, with the slots from `begin` on of a buffer of many."""
    hot = HotBuffer.empty((size,), 16, rows, buffer.device)
    first = torch.tensor([begin, begin + size], dtype=torch.int32, device=buffer.device)
    owner = torch.full((slots,), -1, dtype=torch.int32, device=buffer.device)
    return replace(hot, buffer=buffer, owner=owner, stamp=torch.zeros_like(owner), first=first)


def check_fetch(twin: Any, device: torch.device, **options: Any) -> None:
    """From a large source into the first slots of a large buffer, its last, and those at the borders."""
    near, far, number = make_rows(device)
    large, slots = large_pool(ROW_BYTES, device), SIZE // ROW_BYTES
    count = torch.tensor([5], dtype=torch.int32, device=device)
    for begin in (0, *(border // ROW_BYTES - 4 for border in BORDERS), slots - 9):
        small = hot_window(0, 9, 9, 40, torch.empty(9, ROW_BYTES, dtype=torch.uint8, device=device))
        hot = hot_window(begin, 9, slots, far.capacity, large)
        own = large[begin : begin + 9]
        own.fill_(NONSENSE)
        for wanted in WANTED:
            ids = torch.tensor([wanted], dtype=torch.int32, device=device)
            want = twin.fetch_rows(small, near, ids, count, **options)
            found = twin.fetch_rows(hot, far, number[ids.long()], count, **options)
            assert torch.equal(found, want + begin)
            assert torch.equal(large[found[0].long()], near.segments[0][wanted])
        assert torch.equal(own, small.buffer)
        assert torch.equal(hot.counters, small.counters)
        assert hot.check()
        (want, held), (found, also) = twin.held_rows(small, 64), twin.held_rows(hot, 64)
        assert held.tolist() == also.tolist() == [9]
        assert torch.equal(found[0, :9], want[0, :9] + begin)


# ---- packing ---------------------------------------------------------------------------------------------------------

PACKED = PageFormat(4, 4, 64, 5, 5, 64)


def tokens_of(number: int, device: torch.device) -> tuple[Tensor, Tensor, ChannelStats]:
    """k, v bfloat16 [number, H, D], and statistics."""
    make = torch.Generator().manual_seed(number)
    k, v = (torch.randn(number, PACKED.heads, PACKED.head_dim, generator=make) for _ in range(2))
    stats = ChannelStats.identity(PACKED.heads, PACKED.head_dim).to(device)
    return (k * 3 + 1).bfloat16().to(device), v.bfloat16().to(device), stats


def check_pack_tokens(twin: Any, device: torch.device) -> None:
    """Tokens that lie anywhere in a large pool go to pages anywhere in another one."""
    k, v, stats = tokens_of(60, device)
    memory = large_pool(2 * k[0].numel() * 2, device).view(torch.bfloat16)
    memory = memory.view(-1, 2, PACKED.heads, PACKED.head_dim)
    lines = far_lines(60, 2 * k[0].numel() * 2).to(device)
    memory[lines] = torch.stack([k, v], 1)
    tokens = torch.randperm(60, generator=torch.Generator().manual_seed(1)).view(15, 4).to(device)
    apart = PACKED.page_bytes + 48
    places, pool = far_lines(15, apart, 1).to(device), large_pool(apart, device)
    pool[places] = NONSENSE
    faults = torch.zeros(1, dtype=torch.int32, device=device)
    out = pool[:, : PACKED.page_bytes]
    given = (memory[:, 0], memory[:, 1], lines[tokens], stats, PACKED, "rope", 0.15, faults, out, places)
    twin.pack_tokens(*given)
    want = pack_plain.pack_pages(k[tokens].cpu(), v[tokens].cpu(), stats.to("cpu"), PACKED, "rope", 0.15)
    assert torch.equal(pool[places, : PACKED.page_bytes].cpu(), want)
    assert (pool[places, PACKED.page_bytes :] == NONSENSE).all()
    assert int(faults) == 0


def far_apart(x: Tensor, dim: int) -> Tensor:
    """The same values, the entries of one dimension 2**30 or some more elements apart, in a large pool."""
    inner = list(x.stride())
    inner[dim] = 2**30 + 64 * 31
    pool = large_pool(SIZE, x.device).view(-1)[: SIZE // 2 * 2].view(x.dtype)
    out = pool.as_strided(x.shape, inner)
    assert (x.shape[dim] - 1) * inner[dim] > 2**31
    return out.copy_(x)


def check_pack_pages(twin: Any, device: torch.device) -> None:
    """Pages that lie far apart, and heads that do, as where the cache of a long sequence has heads first."""
    k, v, stats = tokens_of(12, device)
    k, v = (x.view(3, PACKED.tokens, PACKED.heads, PACKED.head_dim) for x in (k, v))
    want = pack_plain.pack_pages(k.cpu(), v.cpu(), stats.to("cpu"), PACKED, "rope", 0.15)
    for dim in (0, 2):
        found = twin.pack_pages(far_apart(k, dim), far_apart(v, dim), stats, PACKED, "rope", 0.15)
        assert torch.equal(found.cpu(), want)
