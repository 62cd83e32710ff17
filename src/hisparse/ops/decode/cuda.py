"""Decode attention in CUDA C++ (``decode.cu``): see :mod:`hisparse.ops.decode` for the operation.

It serves what models use most; everything else goes to the Triton twin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from hisparse.ops._cuda import Kernel, can_run, load_kernel
from hisparse.ops.decode import triton as general
from hisparse.ops.decode.types import DecodeResult, Early, Pages
from hisparse.ops.fetch.cuda import programs
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

DENSE = 64
"""Dense slots of a piece (dense.cuh)."""
MOST_SLOTS = 4096
SHARED = 227 * 1024
"""Bytes of shared memory that a block may have on Hopper."""
FIXED = 1024
"""Bytes of it for barriers, beside page ids."""
COMBINERS, CHANNELS = 256, 32
"""Threads of a block that combines parts, and channels that it has (combine.cu)."""


@dataclass(frozen=True)
class Tuning:
    """tiles: tiles of 16 tokens that a stage holds, each attended to by one warp a KV head; stages: depth of the copy
    pipeline; blocks: blocks a multiprocessor; multiply: 1 has the multipliers shift; groups: groups of KV heads that
    different blocks have."""

    tiles: int
    stages: int
    blocks: int = 1
    multiply: int = 0
    groups: int = 1


def _stage(fmt: PageFormat, tiles: int, sizes: tuple[int, ...]) -> int:
    """Bytes of a stage that holds `tiles` tiles of pages of any of `sizes` tokens."""
    return max(16 * tiles // tokens * replace(fmt, tokens=tokens).page_bytes for tokens in sizes)


def _warps(fmt: PageFormat) -> int:
    """Warps of a block whose registers hold what a warp has to remember."""
    return 16 if fmt.head_dim <= 128 else 8


def _scratch(fmt: PageFormat, queries: int) -> int:
    """Bytes for, in turn, dense slots, queries and V's statistics (query.cuh)."""
    rows, dim = fmt.heads * queries, fmt.head_dim
    return 4 * max(-(-(rows * (dim + 3) + dim // 4) // 4) * 4, 2 * fmt.heads * dim, DENSE * 8 + 16)


def _sums(fmt: PageFormat, tiles: int) -> int:
    """Bytes for what the warps of a block have summed up."""
    return fmt.heads * tiles * 8 * (fmt.head_dim + 6) * 4


@cache
def _shared(fmt: PageFormat, queries: int, tiles: int, stages: int, sizes: tuple[int, ...]) -> int:
    """Bytes of dynamic shared memory."""
    return max(stages * _stage(fmt, tiles, sizes), _sums(fmt, tiles)) + _scratch(fmt, queries)


def _block_format(fmt: PageFormat, groups: int) -> PageFormat:
    """The heads of a page that one block has."""
    return replace(fmt, heads=fmt.heads // groups)


def _tiles(fmt: PageFormat, sizes: tuple[int, ...]) -> int:
    """Tiles of a stage: as many warps as have registers, or more, so that it holds whole pages."""
    tiles = max(1, min(_warps(fmt) // fmt.heads, 8))
    while any(16 * tiles % tokens for tokens in sizes):
        tiles += 1
    return tiles


@cache
def _groups(fmt: PageFormat, sizes: tuple[int, ...]) -> int:
    """Groups of heads: as few as leave a block no more warps than have registers, about; 0 where none do."""
    for groups in range(1, fmt.heads + 1):
        # A group's steps and zeros are copied in multiples of 16 bytes.
        if fmt.heads % groups or (groups > 1 and fmt.heads // groups * (fmt.head_dim // fmt.group) % 4):
            continue
        own = _block_format(fmt, groups)
        if own.heads * _tiles(own, sizes) <= 5 * _warps(fmt) // 4:
            return groups
    return 0


@cache
def default_tuning(fmt: PageFormat, sizes: tuple[int, ...], queries: int = 8) -> Tuning:
    """As many warps as have registers, and stages that fill shared memory."""
    groups = max(1, _groups(fmt, sizes))
    own = _block_format(fmt, groups)
    tiles = _tiles(own, sizes)
    ids = 16 * 4 * 16 * tiles // min(sizes)
    room = SHARED - FIXED - ids - _scratch(own, queries)
    return Tuning(tiles, max(2, min(8, room // _stage(own, tiles, sizes))), groups=groups)


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _formats(kept: Pages | None, recalled: Pages | None) -> tuple[Pages | None, Pages | None]:
    """The parts that may hold pages."""

    def present(pages: Pages | None) -> Pages | None:
        return pages if pages is not None and pages.table.shape[1] and pages.pool.shape[0] else None

    return present(kept), present(recalled)


def _any_format(dense_k: Tensor) -> PageFormat:
    """What the kernel is compiled for where there are no pages."""
    heads, dim = dense_k.shape[1], dense_k.shape[3]
    return PageFormat(4, heads, dim, 4, 4, dim)


def supports(
    q: Tensor,
    dense_k: Tensor,
    kept: Pages | None,
    recalled: Pages | None,
    stats: ChannelStats | None,
    extra_logit: Tensor | None,
    page_mass: bool,
    split: str | None,
) -> bool:
    """True where this kernel can do it."""
    parts = [pages for pages in _formats(kept, recalled) if pages is not None]
    if (parts and stats is None) or extra_logit is not None or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    formats = [pages.fmt for pages in parts] or [_any_format(dense_k)]
    first = formats[0]
    alike = all((f.k_bits, f.v_bits, f.group) == (first.k_bits, first.v_bits, first.group) for f in formats)
    most = 16 if page_mass else 64
    return (
        alike
        and can_run(q.device.index)
        and first.k_bits in (4, 5)
        and first.v_bits in (4, 5)
        and (first.k_bits == 4 or split in ("rope", "never"))
        and first.head_dim in (64, 128, 256)
        and first.group % 64 == 0
        and q.shape[1] // first.heads <= 8
        and first.heads <= 16
        and all(f.tokens in (4, 8, 16, 32, 64) and f.tokens <= most for f in formats)
        and dense_k.shape[2] <= MOST_SLOTS
        and _groups(first, (4, *(f.tokens for f in formats))) > 0
    )


def _parts(q: Tensor, dense_k: Tensor, blocks: int, groups: int = 1, taken: int = 0) -> tuple[int, int]:
    """Pieces of dense slots, and blocks of a sequence and group of heads: both have a part of the result each. taken:
    multiprocessors that others have."""
    share = max(1, (_multiprocessors(q.device.index or 0) - taken) * blocks // (len(q) * groups))
    return -(-dense_k.shape[2] // DENSE), share


def _room(q: Tensor, parts: int) -> int:
    """Floats that parts and their log-sum-exps take."""
    return q.shape[0] * q.shape[1] * parts * (q.shape[2] + 1)


def reserve(q: Tensor, dense_k: Tensor, buffers: int = 1) -> Early:
    """See :func:`hisparse.ops.decode.reserve`."""
    return Early(q.new_empty(_room(q, sum(_parts(q, dense_k, 1))), dtype=torch.float32), buffers)


def _kernel(
    fmt: PageFormat, queries: int, bf16: bool, sizes: tuple[int, int], mass: bool, split: bool, tune: Tuning, index: int
) -> Kernel:
    defines = {
        "PAGE_HEADS": fmt.heads,
        "HEADS": fmt.heads // tune.groups,
        "QUERIES": queries,
        "DIM": fmt.head_dim,
        "GROUP": fmt.group,
        "K_BITS": fmt.k_bits,
        "V_BITS": fmt.v_bits,
        "SPLIT": int(split and fmt.k_bits == 5),
        "BF16": int(bf16),
        "KEPT_P": sizes[0],
        "ROWS_P": sizes[1],
        "TILES": tune.tiles,
        "STAGES": tune.stages,
        "BLOCKS": tune.blocks,
        "MASS": int(mass),
        "MULTIPLY": tune.multiply,
    }
    return load_kernel("decode/decode.cu", "decode", defines, device=torch.device("cuda", index))


def _even(x: Tensor) -> bool:
    """Rows of `x` can be read in words of two elements."""
    return x.stride(-1) == 1 and not any(step % 2 for step in x.stride()[:-1]) and x.data_ptr() % 4 == 0


def decode_attention(
    q: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    dense_len: Tensor,
    kept: Pages | None,
    recalled: Pages | None,
    stats: ChannelStats | None,
    scaling: float,
    extra_logit: Tensor | None,
    extra_value: Tensor | None,
    page_mass: bool,
    split: str | None,
    tuning: Tuning | None = None,
    early: Early | None = None,
    out: Tensor | None = None,
) -> DecodeResult:
    """See :func:`hisparse.ops.decode.decode_attention`.

    Starting early. The kernel reads queries, dense slots, kept pages, their tables, counts and statistics, and writes
    parts to `early`, while kernels that were launched before it may still run: those from the scan of this step on.
    That is safe because

    - the scan's first kernel lets the next one start only after it has itself waited for what was launched before it,
      and each further kernel starts when all programs of the one ahead have: so when this kernel runs, everything
      launched before the scan has ended, and what it wrote can be seen;
    - `early` was reserved before the scan and is held since: its memory belongs to none of the tensors that the scan
      and the fetch make and drop;
    - nothing else is written before the recalled rows are waited for, and no copy is launched in between: page masses
      and tensors that have to be copied first make the call an ordinary one;
    - when a program starts, all programs of the kernels ahead have their place on the device: none waits for room.

    A block that started when the fetch has ended would be the last one, however little it had to do: so there is none
    for the multiprocessors of the fetch.

    The wait before the recalled rows is a wait for all kernels ahead, since each of them waits for the one before it
    before it ends.
    """
    if not supports(q, dense_k, kept, recalled, stats, extra_logit, page_mass, split):
        return general.decode_attention(
            q, dense_k, dense_v, dense_len, kept, recalled, stats, scaling, extra_logit, extra_value, page_mass, split,
            out=out,
        )  # fmt: skip
    parts = list(_formats(kept, recalled))
    fmt = next((pages.fmt for pages in parts if pages is not None), None) or _any_format(dense_k)
    batch, q_heads, dim = q.shape
    heads = dense_k.shape[1]
    present = [pages for pages in parts if pages is not None]
    given = (q, dense_k, dense_v, dense_len, *(x for pages in present for x in (pages.table, pages.count)))
    if not _even(q):
        q = q.contiguous()
    if dense_k.stride() != dense_v.stride() or not _even(dense_k) or not _even(dense_v):
        dense_k, dense_v = dense_k.contiguous(), dense_v.contiguous()
    dense_len = dense_len.contiguous()
    parts = [
        None if pages is None else replace(pages, table=pages.table.contiguous(), count=pages.count.contiguous())
        for pages in parts
    ]
    present = [pages for pages in parts if pages is not None]
    used = (q, dense_k, dense_v, dense_len, *(x for pages in present for x in (pages.table, pages.count)))
    copied = any(x is not y and x.data_ptr() != y.data_ptr() for x, y in zip(given, used, strict=True))
    sizes = tuple(4 if pages is None else pages.fmt.tokens for pages in parts)  # what is absent needs a size, too
    tune = tuning or default_tuning(fmt, sizes, q_heads // heads)
    own = _block_format(fmt, tune.groups)
    index = q.device.index or 0
    bf16 = q.dtype == torch.bfloat16
    kernel = _kernel(fmt, q_heads // heads, bf16, (sizes[0], sizes[1]), page_mass, split == "rope", tune, index)
    room = _room(q, sum(_parts(q, dense_k, tune.blocks)))
    starts_early = early is not None and len(early.memory) >= room and not page_mass and not copied
    taken = min(programs(early.buffers), _multiprocessors(index) // 2) if early is not None and starts_early else 0
    pieces, share = _parts(q, dense_k, tune.blocks, tune.groups, taken)
    n_part = pieces + (share if any(parts) else 0)
    part = early.memory if early is not None and starts_early else q.new_empty(room, dtype=torch.float32)
    part_lse = part[batch * q_heads * n_part * dim :]
    out = q.new_empty(batch, q_heads, dim) if out is None else out
    lse = q.new_empty(batch, q_heads, dtype=torch.float32)
    masses: list[Tensor | None] = []
    arguments: list[Tensor | None] = []
    widths: list[int] = []
    strides: list[int] = []
    for pages in parts:
        if pages is None:
            masses.append(None)
            arguments += [None] * 4
            widths.append(0)
            strides.append(0)
            continue
        width = pages.table.shape[1]
        mass = q.new_empty(batch, q_heads, width, dtype=torch.float32) if page_mass else None
        masses.append(mass)
        arguments += [pages.pool, pages.table, pages.count, mass]
        widths.append(width)
        strides.append(pages.pool.stride(0))
    statistics: list[Tensor | None] = [None] * 5
    if stats is not None:
        statistics = [stats.order, stats.k_mean, stats.k_scale, stats.v_mean, stats.v_scale]
    kernel(
        (share, batch, tune.groups),
        32 * own.heads * tune.tiles,
        [
            q, dense_k, dense_v, dense_len, *arguments, *statistics, part, part_lse, float(scaling),
            dense_k.shape[2], n_part, *widths, q.stride(0), q.stride(1), dense_k.stride(0), dense_k.stride(1),
            dense_k.stride(2), 1 << 24, *strides, starts_early,
        ],
        shared=_shared(own, q_heads // heads, tune.tiles, tune.stages, sizes),
        overlap=True,
    )  # fmt: skip
    combine = load_kernel("decode/combine.cu", "combine", {"DIM": dim, "BF16": int(bf16)}, device=q.device)
    combine.prefer_shared()(
        (dim // CHANNELS, batch * q_heads, 1), COMBINERS, [part, part_lse, out, lse, n_part], overlap=True
    )
    return DecodeResult(out, lse, masses[0], masses[1])
