"""An independent reader of pages: numpy, float64, one value at a time, written from the description of the layout."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np


def _aligned(size: int) -> int:
    return (size + 15) // 16 * 16


@dataclass
class Decoded:
    values: np.ndarray  # float64 [P, H, D] in stored channel order, normalised
    step: np.ndarray  # float64 [P, H, D], the distance of two codes of that channel
    codes: np.ndarray  # int [P, H, D]
    split: np.ndarray  # bool [H, G]


def _bf16(raw: bytes) -> float:
    return struct.unpack("<f", b"\0\0" + raw)[0]


def decode(
    page: bytes, tokens: int, heads: int, dim: int, k_bits: int, v_bits: int, group: int
) -> tuple[Decoded, Decoded]:
    """K and V of one page."""
    groups, rows = dim // group, heads * tokens
    width = {4: 0, 5: dim // 8, 6: dim // 4}
    sizes = [
        rows * dim // 2,
        rows * width[k_bits],
        rows * dim // 2,
        rows * width[v_bits],
        heads * groups * 4,
        heads * groups * 4,
    ]
    starts = [sum(_aligned(s) for s in sizes[:i]) for i in range(7)]
    assert len(page) == starts[6]
    return tuple(  # type: ignore[return-value]
        _decode(page, tokens, heads, dim, bits, group, starts[2 * i], starts[2 * i + 1], starts[4 + i], width[bits])
        for i, bits in enumerate((k_bits, v_bits))
    )


def _decode(
    page: bytes, tokens: int, heads: int, dim: int, bits: int, group: int, nib: int, ext: int, sca: int, width: int
) -> Decoded:
    half, eighth = dim // 2, dim // 8
    values, steps = np.zeros((tokens, heads, dim)), np.zeros((tokens, heads, dim))
    codes = np.zeros((tokens, heads, dim), dtype=int)
    split = np.zeros((heads, dim // group), dtype=bool)
    for h in range(heads):
        for p in range(tokens):
            row = h * tokens + p
            for j in range(half):
                g = j // (group // 2)
                at = sca + (h * (dim // group) + g) * 4
                step, zero = _bf16(page[at : at + 2]), _bf16(page[at + 2 : at + 4])
                is_split = split[h, g] = step < 0 or str(step) == "-0.0"
                step = abs(step)
                nibbles = page[nib + row * half + j]
                a, b = nibbles % 16, nibbles // 16
                step_a = step_b = step
                s, i = j // eighth, j % eighth
                if bits == 5:
                    x = (page[ext + row * width + i] >> (2 * s)) % 4
                    if is_split:
                        a, step_b = a + 16 * x, step * 63 / 15
                    else:
                        a, b = a + 16 * (x % 2), b + 16 * (x // 2)
                elif bits == 6:
                    a += 16 * ((page[ext + row * width + i] >> (2 * s)) % 4)
                    b += 16 * ((page[ext + row * width + eighth + i] >> (2 * s)) % 4)
                for channel, code, size in ((j, a, step_a), (j + half, b, step_b)):
                    codes[p, h, channel], steps[p, h, channel] = code, size
                    values[p, h, channel] = zero + code * size
    return Decoded(values, steps, codes, split)
