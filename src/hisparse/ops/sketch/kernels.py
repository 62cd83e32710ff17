"""The kernel that sketches bfloat16 keys, which may lie anywhere and whose sketches may go anywhere.

    coordinates = key @ basis - mean @ basis;   scale = their root mean square;   codes = round(coordinates / scale)

Keys are what the matrix units read as they are; the basis is split into three bfloat16 parts, which together have
float32's accuracy. Columns of the product are ordered so that the eight in one thread's hands, two adjacent ones of
every eighth, are the fields of one word of codes: quantising and joining them moves nothing between threads.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
from __future__ import annotations

import weakref

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.ops.scan.kernels import INTERPRET, STEP2, STEP4
from hisparse.ops.sketch import coordinates
from hisparse.vtq.stats import ChannelStats

PARTS = 3
# The interpreter multiplies bfloat16 as the whole numbers of their bits.
OPERAND = tl.constexpr(tl.float32 if INTERPRET else tl.bfloat16)


@triton.jit
def _level(x, factor, STEP: tl.constexpr, LEVELS: tl.constexpr):
    y = tl.floor(x * factor / STEP + LEVELS // 2)
    return tl.minimum(tl.maximum(y, 0.0), LEVELS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize=["n_tokens"])
def sketch_bfloat16(
    p_keys, p_token, p_place, p_basis, p_offset, p_codes, p_scales, n_tokens, stride_row, stride_token, stride_head,
    code_line, scale_line,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, T: tl.constexpr,
    PARTS: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """One head of T tokens. p_basis: bfloat16 [H, PARTS, D, 8 WP], p_offset: float32 [H, 8 WP], columns as `columns`
    orders them. p_codes: int16, code_line from line to line; p_scales: uint8, scale_line from line to line. INDEXED:
    p_token int64 [n_tokens], which token of the keys each is, p_place int64 [n_tokens / R], the line of each row."""
    i_head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    m_t = t < n_tokens
    d = tl.arange(0, D)
    n = tl.arange(0, 8 * WP)
    if INDEXED:
        line = tl.load(p_place + t // R, mask=m_t, other=0)
        p_row = p_keys + tl.load(p_token + t, mask=m_t, other=0) * stride_token
    else:
        line = t // R
        p_row = p_keys + line * stride_row + (t % R) * stride_token
    p_row += i_head.to(tl.int64) * stride_head
    x = tl.load(p_row[:, None] + d[None, :], mask=m_t[:, None], other=0.0).to(OPERAND)
    y = tl.zeros((T, 8 * WP), tl.float32)
    for part in tl.static_range(PARTS):
        at = (i_head * PARTS + PARTS - 1 - part) * D  # the smallest first
        y = tl.dot(x, tl.load(p_basis + (at + d[:, None]) * (8 * WP) + n[None, :]).to(OPERAND), y)
    y -= tl.load(p_offset + i_head * (8 * WP) + n)[None, :]
    square = tl.maximum(tl.sum(y * y, 1) / (6 * W), 3.0517578125e-05)  # 2**-15
    exponent = tl.minimum(tl.maximum(tl.floor(tl.log2(square) * 8 + 128.5), 0.0), 255.0)
    factor = tl.exp2(8.0 - exponent * 0.0625)[:, None, None]
    # Column ((high * 4 + pair) * 4 + quarter) * 2 + i is field 2 * pair + i of word 4 * high + quarter.
    y = tl.permute(tl.reshape(y, (T, WP // 4, 2, 2, 4, 2)), (0, 1, 4, 3, 5, 2))
    low, high = tl.split(y)  # pairs 0, 1 and pairs 2, 3: [T, WP / 4, 4, pair % 2, i]
    even, odd = tl.split(low)  # by i: fields 0, 2 and 1, 3
    f0, f2 = tl.split(even)
    f1, f3 = tl.split(odd)
    even, odd = tl.split(high)
    f4, _ = tl.split(even)
    f5, _ = tl.split(odd)
    word = _level(f0, factor, STEP4, 16) | (_level(f1, factor, STEP4, 16) << 4)
    word |= (_level(f2, factor, STEP2, 4) << 8) | (_level(f3, factor, STEP2, 4) << 10)
    word |= (_level(f4, factor, STEP2, 4) << 12) | (_level(f5, factor, STEP2, 4) << 14)
    w = tl.arange(0, WP // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    here = i_head * R + t % R
    p_word = p_codes + (line * code_line + here * W)[:, None, None] + w[None, :, :]
    tl.store(p_word, word.to(tl.int16), mask=m_t[:, None, None] & (w < W)[None, :, :])
    tl.store(p_scales + line * scale_line + here, exponent.to(tl.uint8), mask=m_t)


def columns(words: int, padded: int) -> Tensor:
    """int64 [8 * padded]: the coordinate in each column of the kernel's product, -1 for none."""
    n = torch.arange(8 * padded)
    word, field = n // 32 * 4 + n // 2 % 4, n // 8 % 4 * 2 + n % 2
    return torch.where((field < 6) & (word < words), field * words + word, -1)


_KEPT: dict[tuple[int, int], tuple[weakref.ref[ChannelStats], Tensor, Tensor]] = {}


def operands(stats: ChannelStats, bits: int) -> tuple[Tensor, Tensor]:
    """The basis in bfloat16 parts [H, PARTS, D, N], greatest first, and the mean key's coordinates float32 [H, N]."""
    key = (id(stats), bits)
    known = _KEPT.get(key)
    if known is not None and known[0]() is stats:
        return known[1], known[2]
    words = coordinates(stats.head_dim, bits)[0] // 2
    order = columns(words, max(4, triton.next_power_of_2(words))).to(stats.k_mean.device)
    basis = torch.where(order >= 0, stats.sketch_basis[..., order.clamp_min(0)], 0.0)
    offset = torch.einsum("hd,hdn->hn", stats.k_mean.double(), basis.double()).float()
    parts, rest = [], basis
    for _ in range(PARTS):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    made = torch.stack(parts, 1).contiguous()
    _KEPT[key] = (weakref.ref(stats, lambda _: _KEPT.pop(key, None)), made, offset)
    return made, offset


def serves(keys: Tensor, stats: ChannelStats) -> bool:
    """True for keys [..., D] that the kernel takes."""
    return keys.dtype == torch.bfloat16 and stats.head_dim in (64, 128, 256) and keys.stride(-1) == 1


def sketch(
    keys: Tensor,
    stats: ChannelStats,
    bits: int,
    codes: Tensor,
    scales: Tensor,
    row_size: int,
    tokens: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """Sketch keys [n, R, H, D], or tokens int64 [n, R] of keys [N, H, D], to lines of codes uint8 [lines, ...], scales
    uint8 [lines, H * R]: line i, or lines places int64 [n]."""
    basis, offset = operands(stats, bits)
    words = coordinates(stats.head_dim, bits)[0] // 2
    padded = basis.shape[3] // 8
    number = keys.shape[0] * row_size if tokens is None else tokens.numel()
    indexed = tokens is not None
    strides = (0, *keys.stride()[:2]) if indexed else keys.stride()[:3]
    block = 128 if stats.head_dim * padded <= 2048 else 64
    options = {} if INTERPRET else {"num_warps": 4 if padded <= 16 else 8}
    grid = (-(-number // block), stats.heads)
    sketch_bfloat16[grid](
        keys, keys if tokens is None else tokens, keys if places is None else places, basis, offset,
        codes.view(torch.int16), scales, number, *strides, codes.stride(0) // 2, scales.stride(0), stats.heads,
        stats.head_dim, row_size, words, padded, block, PARTS, indexed, **options,
    )  # fmt: skip
