"""The instructions that unpack codes on a GPU, two words a register, run here by a small emulator of PTX.

The interpreter cannot run inline assembly and takes a plain path, so that path and the assembly are compared, for every
word, with what the page format says.
"""

from __future__ import annotations

import importlib.util
import os
import re

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

OPS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "shf.l.wrap.b32": lambda a, b, c: ((b << (c & 31)) | (a >> (32 - (c & 31)) if c & 31 else 0)) & 0xFFFFFFFF,
}


def run_ptx(text: str, *operands: int) -> int:
    """The value of $0 after `text`, with $1, $2, ... given."""
    values = {f"${i + 1}": x for i, x in enumerate(operands)}
    for line in re.sub(r"^\{|\}$", "", text.strip()).split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        target, *sources = (part.strip() for part in rest.split(","))
        values[target] = OPS[name](*(values[s] if s in values else int(s, 0) for s in sources))
    return values["$0"]


def pairs(rng: np.random.Generator) -> list[tuple[int, int]]:
    """Registers: a word whose bytes are pairs (a4 | b4 << 4), and one of extra bits, both halves at random."""
    edge = [0, 0xFFFFFFFF, 0x0F0FF0F0, 0x80017FFE]
    return [*((w, x) for w in edge for x in edge), *map(tuple, rng.integers(0, 2**32, (200, 2)).tolist())]


def fields(register: int) -> list[list[int]]:
    """The two bytes of each half."""
    return [[(register >> (16 * half + 8 * byte)) & 0xFF for byte in range(2)] for half in range(2)]


def halves(register: int) -> list[int]:
    return [register & 0xFFFF, register >> 16]


@pytest.mark.parametrize("kind", ["PLAIN", "ONE", "TWO", "MIXED_SPLIT", "MIXED_FIVE"])
def test_masks_give_the_codes_of_the_format(kind: str) -> None:
    """Values in units of a float16's last place: positions 0 and 2 hold a, 1 and 3 hold 16 b, extra bits of b apart."""
    from hisparse.ops.decode import codes

    keep_a = {"MIXED_SPLIT": 0x30, "MIXED_FIVE": 0x10}.get(kind, 0) * 0x10001
    keep_b = {"MIXED_SPLIT": 0, "MIXED_FIVE": 0x20}.get(kind, 0) * 0x10001
    name = kind.split("_")[0]
    for word, extra in pairs(np.random.default_rng(0)):
        for odd in range(2):
            nibbles, bits = ([half[odd] for half in fields(r)] for r in (word, extra))
            high = [(x >> 4) & 3 for x in bits]  # extra bits arrive at bits 4 and 5 of the byte
            a_extra = {"PLAIN": 0, "ONE": 1, "TWO": 3, "MIXED_SPLIT": 3, "MIXED_FIVE": 1}[kind]
            b_extra = {"PLAIN": 0, "ONE": 2, "TWO": 3, "MIXED_SPLIT": 0, "MIXED_FIVE": 2}[kind]
            text = getattr(codes, f"PLAIN_{2 * odd}" if name == "PLAIN" else f"A_{name}_{2 * odd}").value
            got = run_ptx(text, word, extra, keep_a)
            assert halves(got) == [(n & 15) + 16 * (h & a_extra) for n, h in zip(nibbles, high, strict=True)]
            got = run_ptx(getattr(codes, f"PLAIN_{2 * odd + 1}").value, word)
            assert halves(got) == [16 * (n >> 4) for n in nibbles]
            if name != "PLAIN":
                text = getattr(codes, f"B_{name}_{2 * odd + 1}").value
                got = run_ptx(text, extra, keep_b)
                assert halves(got) == [16 * (h & b_extra) for h in high]


@pytest.mark.parametrize("s", range(4))
def test_rotation_brings_every_pair_to_bits_4_and_5(s: int) -> None:
    """Both bytes of both halves, though a rotation moves bits across them."""
    from hisparse.ops.decode import codes

    for _, extra in pairs(np.random.default_rng(1)):
        turned = run_ptx(codes.ROTATE.value, extra, (4 - 2 * s) & 0xFFFF)
        want = [[(byte >> (2 * s)) & 3 for byte in half] for half in fields(extra)]
        assert [[(byte >> 4) & 3 for byte in half] for half in fields(turned)] == want


def test_a_code_is_a_subnormal_float16() -> None:
    """Ten bits, read as float16, are worth their number times 2**-24: what the kernels fold into their factors."""
    bits = np.arange(1024, dtype=np.uint16)
    assert np.array_equal(bits.view(np.float16).astype(np.float64), bits * 2.0**-24)
