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
from hisparse.ops.decode.kernels import combine
from hisparse.ops.decode.types import DecodeResult, Pages
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

CHUNK = 256
"""Dense slots that one block attends to."""
MOST_SLOTS = 1024
SHARED = 227 * 1024
"""Bytes of shared memory that a block may have on Hopper."""


@dataclass(frozen=True)
class Tuning:
    """tiles: tiles of 16 tokens that a stage holds, each attended to by one warp a KV head; stages: depth of the copy
    pipeline; blocks: blocks a multiprocessor; multiply: 1 has the multipliers shift."""

    tiles: int
    stages: int
    blocks: int = 1
    multiply: int = 0


def _stage(fmt: PageFormat, tiles: int, sizes: list[int]) -> int:
    """Bytes of a stage that holds `tiles` tiles of pages of any of `sizes` tokens."""
    return max(16 * tiles // tokens * replace(fmt, tokens=tokens).page_bytes for tokens in sizes)


def _warps(fmt: PageFormat) -> int:
    """Warps of a block whose registers hold what a warp has to remember."""
    return 16 if fmt.head_dim <= 128 else 8


def default_tuning(fmt: PageFormat, sizes: list[int]) -> Tuning:
    """As many warps as have registers, and stages that fill shared memory."""
    tiles = max(1, min(_warps(fmt) // fmt.heads, 8))
    while any(16 * tiles % tokens for tokens in sizes):
        tiles += 1
    return Tuning(tiles, max(2, min(8, (SHARED - 4096) // _stage(fmt, tiles, sizes))))


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _formats(kept: Pages | None, recalled: Pages | None) -> tuple[Pages | None, Pages | None]:
    """The parts that may hold pages."""

    def present(pages: Pages | None) -> Pages | None:
        return pages if pages is not None and pages.table.shape[1] and pages.pool.shape[0] else None

    return present(kept), present(recalled)


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
    """True where this kernel can do it; there must be packed pages."""
    parts = [pages for pages in _formats(kept, recalled) if pages is not None]
    if not parts or stats is None or extra_logit is not None or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    formats = [pages.fmt for pages in parts]
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
        # A stage of whole large pages may take more warps than have registers.
        and first.heads * default_tuning(first, [4, *(f.tokens for f in formats)]).tiles <= 5 * _warps(first) // 4
    )


def _kernel(
    fmt: PageFormat, queries: int, bf16: bool, sizes: tuple[int, int], mass: bool, split: bool, tune: Tuning, index: int
) -> Kernel:
    defines = {
        "HEADS": fmt.heads,
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
        "CHUNK": CHUNK,
        "MULTIPLY": tune.multiply,
    }
    return load_kernel("decode/decode.cu", "decode", defines, device=torch.device("cuda", index))


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
) -> DecodeResult:
    """See :func:`hisparse.ops.decode.decode_attention`."""
    if not supports(q, dense_k, kept, recalled, stats, extra_logit, page_mass, split):
        return general.decode_attention(
            q, dense_k, dense_v, dense_len, kept, recalled, stats, scaling, extra_logit, extra_value, page_mass, split
        )
    assert stats is not None
    parts = _formats(kept, recalled)
    formats = [pages.fmt for pages in parts if pages is not None]
    fmt = formats[0]
    batch, q_heads, dim = q.shape
    heads, slots = dense_k.shape[1], dense_k.shape[2]
    if q.stride(2) != 1:
        q = q.contiguous()
    if dense_k.stride() != dense_v.stride() or dense_k.stride(3) != 1 or dense_k.stride(2) % 2:
        dense_k, dense_v = dense_k.contiguous(), dense_v.contiguous()
    sizes = [4 if pages is None else pages.fmt.tokens for pages in parts]  # what is absent needs a size, too
    tune = tuning or default_tuning(fmt, sizes)
    index = q.device.index or 0
    kernel = _kernel(
        fmt, q_heads // heads, q.dtype == torch.bfloat16, (sizes[0], sizes[1]), page_mass, split == "rope", tune, index
    )
    pieces = -(-slots // CHUNK)
    n_dense = pieces * heads
    n_share = max(1, _multiprocessors(index) * tune.blocks // batch - n_dense)
    n_part = pieces + n_share
    part = q.new_empty(batch, q_heads, n_part, dim, dtype=torch.float32)
    part_lse = q.new_empty(batch, q_heads, n_part, dtype=torch.float32)
    out = q.new_empty(batch, q_heads, dim)
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
        arguments += [pages.pool, pages.table.contiguous(), pages.count, mass]
        widths.append(width)
        strides.append(pages.pool.stride(0))
    stage = _stage(fmt, tune.tiles, sizes)
    kernel(
        (n_dense + n_share, batch, 1),
        32 * heads * tune.tiles,
        [
            q, dense_k, dense_v, dense_len, *arguments, stats.order, stats.k_mean, stats.k_scale, stats.v_mean,
            stats.v_scale, part, part_lse, float(scaling), n_dense, *widths, q.stride(0), q.stride(1),
            dense_k.stride(0), dense_k.stride(1), dense_k.stride(2), 1 << 24, *strides,
        ],
        shared=max(
            tune.stages * stage,
            (tune.stages - 1) * stage + q_heads * (dim + 1) * 4,
            (heads * 8 * dim + 16 * heads * tune.tiles) * 4,
            (8 * dim + CHUNK * 8 + 16) * 4,
        ),
    )  # fmt: skip
    block_d = 32
    combine[(batch * q_heads, -(-dim // block_d))](
        part, part_lse, out, lse, n_part, dim, dim, block_d, 64, max(2, 1 << (n_part - 1).bit_length())
    )
    return DecodeResult(out, lse, masses[0], masses[1])
