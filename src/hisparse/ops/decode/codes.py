"""Codes of packed pages as float16 operands, for Triton kernels.

A token's nibble plane is read as 16-bit words: word c holds the channel pairs 2c and 2c + 1, that is the four codes

    position 0: a of pair 2c (bits 0..3)        position 1: b of pair 2c (bits 4..7)
    position 2: a of pair 2c + 1 (bits 8..11)   position 3: b of pair 2c + 1 (bits 12..15)

A code in the low ten bits of a 16-bit word *is* a float16: the subnormal ``code * 2**-24``, which the matrix units
multiply exactly. So nothing is converted and no magic number is added that would have to cancel again later: masking is
all, and the factor 2**-24 is folded into what the code is multiplied with. Positions 1 and 3 stay where they are after
the mask, worth 16 * code; that factor is folded likewise. Two words are handled at a time, one in each half of a
register: bits that a shift carries over from the other half fall outside the mask.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"

CODE_UNIT = 2.0**24
"""What a masked code, read as float16, has to be multiplied by at positions 0 and 2; at 1 and 3 it is 2**20."""

NEVER, ALWAYS, MIXED = 0, 1, 2
"""Whether blocks of a five-bit tensor are split in six and four bits: a compile-time choice where it is known."""


def _asm(bits: int, mode: int) -> str:
    """PTX for two words: $0..$3 the positions; $4 the words; $5 (5 and 6 bits) the extra bits of a (of both, 5 bits);
    $6 the extra bits of b (6 bits), or the mask of a, with $7 the mask of b (5 bits, mixed).

    Extra bits of a pair arrive at bits 4..5 of the pair's byte. a takes them there. b, which lies at bits 4..7, takes
    bit 5 to bit 8 (5 bits) or bits 4..5 to bits 8..9 (6 bits).
    """
    lines = ["{ .reg .b32 w, y, t, u;", "shr.u32 w, $4, 8;"]
    for position, (word, nibble) in enumerate((("$4", "F"), ("$4", "F0"), ("w", "F"), ("w", "F0"))):
        mask, odd, fast = f"0x{int(nibble, 16) * 0x10001:08x}", position >= 2, position % 2 == 1
        out = f"${position}"
        if bits == 4 or (bits == 5 and mode == ALWAYS and fast):
            lines.append(f"and.b32 {out}, {word}, {mask};")
            continue
        if not fast:
            keep = "$6" if bits == 5 and mode == MIXED else ("0x00100010" if bits == 5 and mode == NEVER else "0x00300030")
            lines.append("shr.u32 y, $5, 8;" if odd else "mov.b32 y, $5;")
        elif bits == 5:
            keep = "$7" if mode == MIXED else "0x01000100"
            lines.append("shr.u32 y, $5, 5;" if odd else "shl.b32 y, $5, 3;")
        else:
            keep = "0x03000300"
            lines.append("shr.u32 y, $6, 4;" if odd else "shl.b32 y, $6, 4;")
        lines += [f"and.b32 t, {word}, {mask};", f"and.b32 u, y, {keep};", f"or.b32 {out}, t, u;"]
    return " ".join([*lines, "}"])


ASM_4 = tl.constexpr(_asm(4, NEVER))
ASM_5_NEVER = tl.constexpr(_asm(5, NEVER))
ASM_5_ALWAYS = tl.constexpr(_asm(5, ALWAYS))
ASM_5_MIXED = tl.constexpr(_asm(5, MIXED))
ASM_6 = tl.constexpr(_asm(6, NEVER))
ASM_ROTATE = tl.constexpr(
    "{ .reg .b32 s; and.b32 s, $2, 31; shf.l.wrap.b32 $0, $1, $1, s; }"
)


@triton.jit
def _half(word):
    """The low 16 bits of an int32 tile, as float16."""
    return word.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def rotate(x, turn, SIMD: tl.constexpr):
    """x int16 shifted left by `turn` (negative: right) so far that no wanted bit is lost; `turn` int16, broadcastable.

    Two words in one register must share their turn (SIMD).
    """
    if SIMD:
        x, turn = tl.broadcast(x, turn)
        return tl.inline_asm_elementwise(
            asm=ASM_ROTATE, constraints="=r,r,r", args=[x, turn], dtype=tl.int16, is_pure=True, pack=2
        )
    wide = x.to(tl.int32) & 0xFFFF
    turn = turn.to(tl.int32)
    return ((wide << tl.maximum(turn, 0)) >> tl.maximum(-turn, 0)).to(tl.int16)


@triton.jit
def codes(w, xa, xb, keep_a, keep_b, BITS: tl.constexpr, MODE: tl.constexpr, SIMD: tl.constexpr):
    """Four float16 tiles, positions 0..3, of int16 words `w`.

    xa, xb: extra bits, rotated to bits 4..5 of each byte (xb for 6 bits). keep_a, keep_b: int16 masks in mixed mode,
    0x30 and 0 for a split block, 0x10 and 0x100 for one in five bits.
    """
    H: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
    if SIMD:
        if BITS == 4:
            r = tl.inline_asm_elementwise(
                asm=ASM_4, constraints="=r,=r,=r,=r,r", args=[w], dtype=H, is_pure=True, pack=2
            )
        elif BITS == 6:
            r = tl.inline_asm_elementwise(
                asm=ASM_6, constraints="=r,=r,=r,=r,r,r,r", args=[w, xa, xb], dtype=H, is_pure=True, pack=2
            )
        elif MODE == 2:
            w, keep_a = tl.broadcast(w, keep_a)
            w, keep_b = tl.broadcast(w, keep_b)
            r = tl.inline_asm_elementwise(
                asm=ASM_5_MIXED,
                constraints="=r,=r,=r,=r,r,r,r,r",
                args=[w, xa, keep_a, keep_b],
                dtype=H,
                is_pure=True,
                pack=2,
            )
        elif MODE == 1:
            r = tl.inline_asm_elementwise(
                asm=ASM_5_ALWAYS, constraints="=r,=r,=r,=r,r,r", args=[w, xa], dtype=H, is_pure=True, pack=2
            )
        else:
            r = tl.inline_asm_elementwise(
                asm=ASM_5_NEVER, constraints="=r,=r,=r,=r,r,r", args=[w, xa], dtype=H, is_pure=True, pack=2
            )
        return r[0], r[1], r[2], r[3]
    w = w.to(tl.int32)
    a0, b0, a1, b1 = w & 0xF, w & 0xF0, (w >> 8) & 0xF, (w >> 8) & 0xF0
    if BITS == 5:
        y = xa.to(tl.int32)
        if MODE == 2:
            ka, kb = keep_a.to(tl.int32), keep_b.to(tl.int32)
        elif MODE == 1:
            ka, kb = 0x30, 0
        else:
            ka, kb = 0x10, 0x100
        a0, a1 = a0 | (y & ka), a1 | ((y >> 8) & ka)
        b0, b1 = b0 | ((y << 3) & kb), b1 | ((y >> 5) & kb)
    elif BITS == 6:
        y, z = xa.to(tl.int32), xb.to(tl.int32)
        a0, a1 = a0 | (y & 0x30), a1 | ((y >> 8) & 0x30)
        b0, b1 = b0 | ((z << 4) & 0x300), b1 | ((z >> 4) & 0x300)
    return _half(a0), _half(b0), _half(a1), _half(b1)
