"""The yardstick kernels: they read, or copy, and do nothing else."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False, disable-error-code="attr-defined"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read(p_x, p_out, n_block, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(tl.program_id(0), n_block, tl.num_programs(0)):
        total += tl.load(p_x + i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(p_out + tl.program_id(0), tl.sum(total, 0))


def read_all(x: Tensor, programs: int, block: int, warps: int) -> Tensor:
    """Sums of x int32 [n], n a multiple of `block`, by program."""
    out = x.new_empty(programs)
    _read[(programs,)](x, out, len(x) // block, block, num_warps=warps)
    return out


@triton.jit
def _copy(p_x, p_y, n_block, BLOCK: tl.constexpr):
    for i in range(tl.program_id(0), n_block, tl.num_programs(0)):
        at = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_y + at, tl.load(p_x + at))


def copy_all(x: Tensor, y: Tensor, programs: int, block: int, warps: int) -> None:
    """y = x, int32 [n], n a multiple of `block`."""
    _copy[(programs,)](x, y, len(x) // block, block, num_warps=warps)
