"""Codes of packed pages as float16 operands, for Triton kernels.

A token's nibble plane is read as 16-bit words: word c holds the channel pairs 2c and 2c + 1, that is the four codes

    position 0: a of pair 2c (bits 0..3)        position 1: b of pair 2c (bits 4..7)
    position 2: a of pair 2c + 1 (bits 8..11)   position 3: b of pair 2c + 1 (bits 12..15)

A code in the low ten bits of a 16-bit word *is* a float16: the subnormal ``code * 2**-24``, which the matrix units
multiply exactly (how they sum such products is said at ``kernels._lift``). So nothing is converted and no magic number
is added that would have to cancel again later: masking is all, and the factor 2**-24 is folded into what the code is
multiplied with. Positions 1 and 3 stay where they are after the mask, worth 16 * code; that factor is folded likewise.
Two words are handled at a time, one in each half of a register: bits that a shift carries over from the other half
fall outside the mask.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="assignment,misc,var-annotated,no-any-return"
# What Triton compiles is less than Python: a tuple grows by +, and where a constant decides, what follows a return is
# compiled unless it stands in an else.
# ruff: noqa: RET505
from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"

NEVER, ALWAYS, MIXED = 0, 1, 2
"""Whether blocks of a five-bit tensor are split in six and four bits: a compile-time choice where it is known."""


def _asm(shift_word: int, mask: int, shift_extra: int | None = None, keep: int | None = None) -> str:
    """PTX: $0 = ($1 >> shift_word & mask) | ($2 >> shift_extra & keep), in both halves; $3 is `keep` where it is
    None."""
    word = f"{{ .reg .b32 w, y; shr.u32 w, $1, {shift_word};" if shift_word else "{ .reg .b32 w, y; mov.b32 w, $1;"
    word += f" and.b32 w, w, 0x{mask * 0x10001:08x};"
    if shift_extra is None:
        return f"{word} mov.b32 $0, w; }}"
    shift = f"shr.u32 y, $2, {shift_extra}" if shift_extra > 0 else f"shl.b32 y, $2, {-shift_extra}"
    kept = "$3" if keep is None else f"0x{keep * 0x10001:08x}"
    return f"{word} {shift}; and.b32 y, y, {kept}; or.b32 $0, w, y; }}"


# Extra bits of a pair arrive at bits 4..5 of the pair's byte, where a takes them. Those of b, which lies at bits 4..7,
# would have to be shifted to bit 8; they make an operand of their own instead, masked in place, and what it is
# multiplied with is larger: the matrix units have time to spare, the integer units have none.
PLAIN_0, PLAIN_1 = tl.constexpr(_asm(0, 0xF)), tl.constexpr(_asm(0, 0xF0))
PLAIN_2, PLAIN_3 = tl.constexpr(_asm(8, 0xF)), tl.constexpr(_asm(8, 0xF0))
A_ONE_0, A_ONE_2 = tl.constexpr(_asm(0, 0xF, 0, 0x10)), tl.constexpr(_asm(8, 0xF, 8, 0x10))
A_TWO_0, A_TWO_2 = tl.constexpr(_asm(0, 0xF, 0, 0x30)), tl.constexpr(_asm(8, 0xF, 8, 0x30))
A_MIXED_0, A_MIXED_2 = tl.constexpr(_asm(0, 0xF, 0)), tl.constexpr(_asm(8, 0xF, 8))
B_ONE_1, B_ONE_3 = tl.constexpr(_asm(0, 0x20)), tl.constexpr(_asm(8, 0x20))
B_TWO_1, B_TWO_3 = tl.constexpr(_asm(0, 0x30)), tl.constexpr(_asm(8, 0x30))
B_MIXED_1 = tl.constexpr("and.b32 $0, $1, $2;")
B_MIXED_3 = tl.constexpr("{ .reg .b32 y; shr.u32 y, $1, 8; and.b32 $0, y, $2; }")
EXP2 = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
LOG2 = tl.constexpr("lg2.approx.ftz.f32 $0, $1;")
INVERSE = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
ROTATE = tl.constexpr("shf.l.wrap.b32 $0, $1, $1, $2;")


if INTERPRET:

    def bound(x: Any) -> int:
        """A scalar as a loop bound: the interpreter's one-element arrays are none for recent versions of numpy."""
        return int(x.handle.data.item())

    def operand(x: Any) -> Any:
        """A tile as an operand of a matrix product: the interpreter multiplies the bits of bfloat16, not its values."""
        return x.to(tl.float32)

else:

    @triton.jit
    def bound(x):
        return x

    @triton.jit
    def operand(x):
        return x


@triton.jit
def _half(word):
    """The low 16 bits of an int32 tile, as float16."""
    return word.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def exp2(x, SIMD: tl.constexpr):
    """2**x; subnormal results are 0 where that saves instructions. So in the next two."""
    if SIMD:
        return tl.inline_asm_elementwise(EXP2, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.jit
def log2(x, SIMD: tl.constexpr):
    if SIMD:
        return tl.inline_asm_elementwise(LOG2, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def inverse(x, SIMD: tl.constexpr):
    if SIMD:
        return tl.inline_asm_elementwise(INVERSE, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 1.0 / x


@triton.jit
def rotate(x, turn, SIMD: tl.constexpr):
    """x int16 shifted left by `turn` (negative: right) so far that no wanted bit is lost; `turn` int16, broadcastable.

    Two words in one register must share their turn (SIMD). `turn` is read from memory: a tile that is loaded can be
    brought into the matrix units' register layout before it is unpacked, one that is computed from a range cannot.
    """
    if SIMD:
        x, turn = tl.broadcast(x, turn)
        return tl.inline_asm_elementwise(ROTATE, "=r,r,r", [x, turn], dtype=tl.int16, is_pure=True, pack=2)
    wide = x.to(tl.int32) & 0xFFFF
    turn = turn.to(tl.int32)
    return ((wide << tl.maximum(turn, 0)) >> tl.maximum(-turn, 0)).to(tl.int16)


@triton.jit
def _simd1(ASM: tl.constexpr, w):
    return tl.inline_asm_elementwise(ASM, "=r,r", [w], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _simd2(ASM: tl.constexpr, w, x):
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [w, x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _simd3(ASM: tl.constexpr, w, x, keep):
    w, keep = tl.broadcast(w, keep)
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [w, x, keep], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def codes(w, xa, xb, keep_a, keep_b, BITS: tl.constexpr, MODE: tl.constexpr, SIMD: tl.constexpr):
    """Float16 tiles of int16 words `w`: positions 0..3, then the extra bits of b at positions 1 and 3 where there are
    any: with 5 bits in units of 32, with 6 in units of 16, while the bits of the nibble count 16 from the lowest on.

    xa, xb: extra bits, rotated to bits 4..5 of each byte (xb for 6 bits). keep_a, keep_b: int16 masks in mixed mode,
    0x30 and 0 for a split block, 0x10 and 0x20 for one in five bits.
    """
    if SIMD:
        c1 = _simd1(PLAIN_1, w)
        c3 = _simd1(PLAIN_3, w)
        if BITS == 4:
            return _simd1(PLAIN_0, w), c1, _simd1(PLAIN_2, w), c3
        elif BITS == 6:
            e1 = _simd1(B_TWO_1, xb)
            return _simd2(A_TWO_0, w, xa), c1, _simd2(A_TWO_2, w, xa), c3, e1, _simd1(B_TWO_3, xb)
        elif MODE == 2:
            c0 = _simd3(A_MIXED_0, w, xa, keep_a)
            c2 = _simd3(A_MIXED_2, w, xa, keep_a)
            xa, keep_b = tl.broadcast(xa, keep_b)
            return c0, c1, c2, c3, _simd2(B_MIXED_1, xa, keep_b), _simd2(B_MIXED_3, xa, keep_b)
        elif MODE == 1:
            return _simd2(A_TWO_0, w, xa), c1, _simd2(A_TWO_2, w, xa), c3
        else:
            e1 = _simd1(B_ONE_1, xa)
            return _simd2(A_ONE_0, w, xa), c1, _simd2(A_ONE_2, w, xa), c3, e1, _simd1(B_ONE_3, xa)
    else:
        w = w.to(tl.int32)
        a0 = w & 0xF
        b0 = w & 0xF0
        a1 = (w >> 8) & 0xF
        b1 = (w >> 8) & 0xF0
        if BITS == 4:
            return _half(a0), _half(b0), _half(a1), _half(b1)
        else:
            y = xa.to(tl.int32)
            z = xb.to(tl.int32)
            if BITS == 6:
                ka = 0x30
                kb = 0x30
            elif MODE == 2:
                ka = keep_a.to(tl.int32)
                kb = keep_b.to(tl.int32)
            elif MODE == 1:
                ka = 0x30
                kb = 0
            else:
                ka = 0x10
                kb = 0x20
            a0 = a0 | (y & ka)
            a1 = a1 | ((y >> 8) & ka)
            return _half(a0), _half(b0), _half(a1), _half(b1), _half(z & kb), _half((z >> 8) & kb)
