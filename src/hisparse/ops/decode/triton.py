"""Decode attention in Triton: see :mod:`hisparse.ops.decode` for the operation and :mod:`.kernels` for how."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.errors import UnsupportedError
from hisparse.ops.decode.codes import ALWAYS, INTERPRET, MIXED, NEVER
from hisparse.ops.decode.kernels import combine, packed_share, plain_share
from hisparse.ops.decode.types import DecodeResult, Pages
from hisparse.vtq.format import Fields, PageFormat
from hisparse.vtq.stats import ChannelStats


@dataclass(frozen=True)
class Tuning:
    """How the work is cut: tokens a tile, warps a program, depth of the load pipeline (a tile's page ids take half of
    it), programs a multiprocessor, and the most registers a thread may use.

    All programs of a launch should be resident at once: one left over runs alone, for as long as all others took. A
    warp of 168 registers leaves room for two more in its quarter of a multiprocessor, one of 210 for only one more."""

    block: int = 32
    warps: int = 1
    stages: int = 5
    programs: int = 12
    registers: int | None = 168


WIDE = Tuning(warps=4, programs=2, registers=None)
"""For heads wider than 128, whose accumulators fill the registers of several warps."""
EXACT = Tuning(warps=4, stages=3, programs=2, registers=None)
"""For float32 queries, which take every matrix product twice."""
ROOMY = Tuning(programs=8, registers=None)
"""For what does not fit in 168 registers: blocks that each say whether they are split, or over eight queries a head."""
DENSE_BLOCK = 32


# Counts that are data, not layout: compiling anew where one of them happens to be 1 would gain nothing.
_PLAIN = ["n_extra", "n_dense_share", "n_extra_share", "n_rows_share", "n_kept_share", "n_kept_max", "n_rows_max"]


@triton.jit(do_not_specialize=_PLAIN)
def _decode(
    p_q, p_dense_k, p_dense_v, p_dense_len, p_kept, p_kept_table, p_kept_count, p_kept_mass, p_rows, p_rows_table,
    p_rows_count, p_rows_mass, p_turn, p_order, p_k_mean, p_k_scale, p_v_mean, p_v_scale, p_logit, p_value,
    p_part, p_part_lse,
    scaling, n_extra, n_dense_share, n_extra_share, n_rows_share, n_kept_share, n_kept_max, n_rows_max,
    stride_q_batch, stride_q_head, stride_dense_batch, stride_dense_head, stride_dense_token,
    HEADS: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr,
    KEPT_BLOCK: tl.constexpr, ROWS_BLOCK: tl.constexpr, PLAIN_BLOCK: tl.constexpr, EXACT: tl.constexpr,
    MASS: tl.constexpr, SIMD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One share: the first are of the dense slots (few tokens, long latency), then extra tokens, rows, kept pages."""
    i_share = tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2).to(tl.int64)
    n_share = tl.num_programs(0)
    i_first = i_batch * (HEADS * Q) + i_head * Q  # the first query head
    p_q += i_batch * stride_q_batch + i_head * Q * stride_q_head
    p_out = p_part + (i_first * n_share + i_share) * D
    p_lse = p_part_lse + i_first * n_share + i_share
    if i_share < n_dense_share:
        at = i_batch * stride_dense_batch + i_head.to(tl.int64) * stride_dense_head
        plain_share(
            p_q, p_dense_k + at, p_dense_v + at, p_part_lse, p_out, p_lse, p_part_lse, p_kept_table,
            tl.load(p_dense_len + i_batch), i_share, n_dense_share, scaling, stride_q_head, 0, n_share * D, n_share, 0,
            stride_dense_token, 0, D, Q, QP, 0, PLAIN_BLOCK, False, False,
        )  # fmt: skip
    elif i_share < n_dense_share + n_extra_share:
        plain_share(
            p_q, p_value, p_value + (i_batch * HEADS + i_head) * n_extra * D, p_logit + i_first * n_extra, p_out, p_lse,
            p_part_lse, p_kept_table, n_extra, i_share - n_dense_share, n_extra_share, scaling, stride_q_head, n_extra,
            n_share * D, n_share, 0, D, 0, D, Q, QP, 0, PLAIN_BLOCK, True, False,
        )  # fmt: skip
    elif i_share < n_dense_share + n_extra_share + n_rows_share:
        i_own = i_share - n_dense_share - n_extra_share
        _paged(
            p_q, p_out, p_lse, p_rows_mass + i_first * n_rows_max, p_turn, p_order, p_k_mean, p_k_scale, p_v_mean,
            p_v_scale,
            p_rows, p_rows_table + i_batch * n_rows_max, p_rows_count + i_batch, i_head, i_own, n_rows_share, scaling,
            stride_q_head, n_share * D, n_share, n_rows_max, D, Q, QP, ROWS, ROWS_BLOCK, PLAIN_BLOCK, EXACT,
            MASS, SIMD, STAGES,
        )  # fmt: skip
    else:
        i_own = i_share - n_dense_share - n_extra_share - n_rows_share
        _paged(
            p_q, p_out, p_lse, p_kept_mass + i_first * n_kept_max, p_turn, p_order, p_k_mean, p_k_scale, p_v_mean,
            p_v_scale,
            p_kept, p_kept_table + i_batch * n_kept_max, p_kept_count + i_batch, i_head, i_own, n_kept_share, scaling,
            stride_q_head, n_share * D, n_share, n_kept_max, D, Q, QP, KEPT, KEPT_BLOCK, PLAIN_BLOCK, EXACT,
            MASS, SIMD, STAGES,
        )  # fmt: skip


@triton.jit
def _paged(
    p_q, p_out, p_lse, p_mass, p_turn, p_order, p_k_mean, p_k_scale, p_v_mean, p_v_scale, p_pool, p_table, p_count,
    i_head, i_share, n_share, scaling, stride_q, stride_out, stride_lse, stride_mass,
    D: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, FMT: tl.constexpr, BLOCK: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr, EXACT: tl.constexpr, MASS: tl.constexpr, SIMD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A share of pages in the format FMT, a tuple as _format makes it. No tokens: there are none, nothing is
    compiled."""
    TOKENS: tl.constexpr = FMT[0]
    STRIDE: tl.constexpr = FMT[1]
    GROUP: tl.constexpr = FMT[2]
    RAW_V: tl.constexpr = FMT[3]
    if TOKENS > 0:
        if GROUP > 0:
            packed_share(
                p_q, p_out, p_lse, p_mass, p_turn, p_order, p_k_mean, p_k_scale, p_v_mean, p_v_scale, p_pool, p_table,
                tl.load(p_count), i_head, i_share, n_share, scaling, stride_q, stride_out, stride_lse, stride_mass,
                D, Q, QP, FMT, BLOCK, EXACT, MASS, SIMD, STAGES,
            )  # fmt: skip
        else:
            at = i_head * (TOKENS * D)
            plain_share(
                p_q, p_pool + at, p_pool + RAW_V + at, p_lse, p_out, p_lse, p_mass, p_table,
                tl.load(p_count) * TOKENS, i_share, n_share, scaling, stride_q, 0, stride_out, stride_lse, stride_mass,
                D, STRIDE, D, Q, QP, TOKENS, BLOCK, False, MASS,
            )  # fmt: skip


def _mode(bits: int, split: str | None, of_keys: bool) -> int:
    if bits != 5 or split == "never" or (split == "rope" and not of_keys):
        return NEVER
    return ALWAYS if split == "rope" else MIXED


def _field(field: Fields, split: str | None, of_keys: bool) -> list[int]:
    return [field.bits, _mode(field.bits, split, of_keys), field.nibbles, field.extra, field.scales]


def _format(fmt: PageFormat, stride: int, split: str | None) -> tuple[int, ...]:
    """What the kernel must know of a format: (tokens, bytes from page to page, group, 0, five numbers of K, five of V);
    for a raw one (tokens, elements from page to page, 0, offset of V in elements)."""
    if fmt.raw_dtype is not None:
        size = fmt.raw_dtype.itemsize
        return fmt.tokens, stride // size, 0, fmt.raw_v_offset // size
    return (fmt.tokens, stride, fmt.group, 0, *_field(fmt.k, split, True), *_field(fmt.v, split, False))


NO_PAGES = (0, 0, 0, 0)


def check_format(fmt: PageFormat) -> None:
    """Raises UnsupportedError for a page that the kernels cannot read in 16-bit words."""
    if not fmt.is_raw and (fmt.head_dim % 16 or fmt.group % 8):
        raise UnsupportedError(
            f"decode kernel: head_dim = {fmt.head_dim}, group = {fmt.group}; it needs multiples of 16 and 8: "
            "set HISPARSE_BACKEND=reference"
        )
    if fmt.tokens & (fmt.tokens - 1):
        raise UnsupportedError(f"decode kernel: {fmt.tokens} tokens a page; use a power of two")


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@lru_cache(maxsize=64)
def _turns(dim: int, device: torch.device) -> Tensor:
    """How far the extra bits of each 16-bit word are shifted left, int16: pair s * (D/8) + i has them at bit 2 s.

    Longer than D/4, because padded columns read it, too.
    """
    word = torch.arange(dim // 4 + max(16, dim // 4), device=device)
    return (4 - 2 * (word // (dim // 16) % 4)).to(torch.int16)


def _shares(budget: int, tokens: int, block: int) -> int:
    """Programs for one sequence and KV head: no more than `budget`, and four tiles of work for each."""
    return max(1, min(budget, -(-tokens // (4 * block))))


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
    out: Tensor | None = None,
) -> DecodeResult:
    """See :func:`hisparse.ops.decode.decode_attention`."""
    batch, q_heads, dim = q.shape
    heads, slots = dense_k.shape[1], dense_k.shape[2]
    queries = q_heads // heads
    exact = q.dtype == torch.float32
    present = [pages.fmt for pages in (kept, recalled) if pages is not None and not pages.fmt.is_raw]
    mixing = any(MIXED in (_mode(fmt.k_bits, split, True), _mode(fmt.v_bits, split, False)) for fmt in present)
    tune = tuning or (EXACT if exact else WIDE if dim > 128 else ROOMY if mixing or queries > 8 else Tuning())
    if q.stride(2) != 1:
        q = q.contiguous()
    if dense_k.stride() != dense_v.stride() or dense_k.stride(3) != 1:
        dense_k, dense_v = dense_k.contiguous(), dense_v.contiguous()
    dense_len = dense_len.contiguous()
    formats: list[tuple[int, ...]] = []
    blocks: list[int] = []
    totals: list[int] = []
    pools: list[tuple[Tensor, Tensor, Tensor, int]] = []
    masses: list[Tensor | None] = []
    for pages in (kept, recalled):
        if pages is None or not pages.table.shape[1] or not pages.pool.shape[0]:
            formats.append(NO_PAGES)
            blocks.append(16)
            totals.append(0)
            pools.append((dense_len.view(torch.uint8), dense_len, dense_len, 0))
            masses.append(None)
            continue
        check_format(pages.fmt)
        formats.append(_format(pages.fmt, pages.pool.stride(0), split))
        blocks.append(max(tune.block, pages.fmt.tokens) if page_mass else tune.block)
        width = pages.table.shape[1]
        totals.append(width * pages.fmt.tokens)
        pool = pages.pool if pages.fmt.raw_dtype is None else pages.pool.view(pages.fmt.raw_dtype)
        pools.append((pool, pages.table.contiguous(), pages.count.contiguous(), width))
        masses.append(q.new_empty(batch, q_heads, width, dtype=torch.float32) if page_mass else None)
    extra = 0 if extra_logit is None else extra_logit.shape[2]
    if extra_logit is not None and extra_value is not None:
        extra_logit, extra_value = extra_logit.contiguous(), extra_value.contiguous()
    plain_block = 16 if dim > 128 else DENSE_BLOCK
    n_dense = -(-slots // plain_block)
    n_extra = -(-extra // (2 * plain_block))
    sms = 4 if INTERPRET or not q.is_cuda else _multiprocessors(q.device.index)
    budget = max(1, sms * tune.programs // (batch * heads) - n_dense - n_extra)
    n_rows = _shares(budget, totals[1], blocks[1]) if totals[1] else 0
    n_kept = _shares(max(1, budget - n_rows), totals[0], blocks[0]) if totals[0] else 0
    n_share = max(1, n_dense + n_extra + n_rows + n_kept)
    if n_dense + n_extra + n_rows + n_kept == 0:
        n_dense = 1  # nothing to attend to: one share that finds no token
    part = q.new_empty(batch, q_heads, n_share, dim, dtype=torch.float32)
    part_lse = q.new_empty(batch, q_heads, n_share, dtype=torch.float32)
    out = q.new_empty(batch, q_heads, dim) if out is None else out
    lse = q.new_empty(batch, q_heads, dtype=torch.float32)
    k_mean = stats.k_mean if stats is not None else part_lse
    means = (
        (stats.order, k_mean, stats.k_scale, stats.v_mean, stats.v_scale)
        if stats is not None
        else (dense_len, part_lse, part_lse, part_lse, part_lse)
    )
    options = {} if INTERPRET else {"num_warps": tune.warps, "maxnreg": tune.registers}
    mass = [x if x is not None else part_lse for x in masses]
    _decode[(n_share, heads, batch)](
        q, dense_k, dense_v, dense_len, pools[0][0], pools[0][1], pools[0][2], mass[0], pools[1][0], pools[1][1],
        pools[1][2], mass[1], _turns(dim, q.device), *means, part_lse if extra_logit is None else extra_logit,
        q if extra_value is None else extra_value, part, part_lse, float(scaling), extra, n_dense, n_extra, n_rows,
        n_kept, pools[0][3], pools[1][3], q.stride(0), q.stride(1), dense_k.stride(0), dense_k.stride(1),
        dense_k.stride(2), heads, dim, queries, max(8, triton.next_power_of_2(queries)), formats[0], formats[1],
        blocks[0], blocks[1], plain_block, exact, page_mass, not INTERPRET and dim // 16 % 2 == 0,
        tune.stages, **options,
    )  # fmt: skip
    block_d = 32
    combine[(batch * q_heads, -(-dim // block_d))](
        part, part_lse, out, lse, n_share, dim, dim, block_d, 64, max(2, triton.next_power_of_2(n_share))
    )
    return DecodeResult(out, lse, masses[0], masses[1])
