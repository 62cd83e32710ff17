"""Quantise K and V into pages."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops._dispatch import select_backend
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

__all__ = ["pack_pages"]

Split = Literal["rope", "peaks", "never"]


def pack_pages(
    k: Tensor,
    v: Tensor,
    stats: ChannelStats | None,
    fmt: PageFormat,
    split: Split = "rope",
    peak_threshold: float = 0.15,
    faults: Tensor | None = None,
) -> Tensor:
    """Pages uint8 [n, page_bytes] of keys (post-RoPE) and values [n, P, H, D] in float16, bfloat16 or float32.

    K and V are normalised by `stats` (None only for a raw format), K's channels put in `stats.order`, and each block -
    one page's tokens x one head's channel group - is quantised to ``zero + code * step``. With five bits, `split` says
    which blocks give six bits to the slow half of the channels and four to the fast half: "rope" all blocks of K,
    "peaks" the blocks of K and V whose two-component Gaussian fit has components further apart than `peak_threshold`
    of the block's range, "never" none. A block of one value is exact in float16 and bfloat16.

    The same values give the same bytes. Raises FormatError for shapes or dtypes that do not fit `fmt`, and for inf, NaN
    or values beyond the range of the format, naming the first place. To find such values the host has to wait for the
    device; with `faults`, int32 [1] on k's device, a kernel counts there instead how many blocks hold one, whose pages
    then mean nothing: look at it before the result is relied on.
    """
    shape = (fmt.tokens, fmt.heads, fmt.head_dim)
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4 or tuple(x.shape[1:]) != shape:
            raise FormatError(
                f"pack_pages: {name} has shape {list(x.shape)}; "
                f"this format takes [n, {shape[0]}, {shape[1]}, {shape[2]}]"
            )
        if not x.dtype.is_floating_point:
            raise FormatError(f"pack_pages: {name} is {x.dtype}; it must be float16, bfloat16 or float32")
    if len(k) != len(v) or k.dtype != v.dtype or k.device != v.device:
        raise FormatError(
            f"pack_pages: k ({len(k)} pages, {k.dtype}, {k.device}) and "
            f"v ({len(v)} pages, {v.dtype}, {v.device}) differ; give both alike"
        )
    if split not in ("rope", "peaks", "never"):
        raise FormatError(f'pack_pages: split = {split!r}; use "rope", "peaks" or "never"')
    check_stats(stats, fmt, "pack_pages")
    pages: Tensor = select_backend("pack", k.device).pack_pages(k, v, stats, fmt, split, peak_threshold, faults)
    return pages


def check_stats(stats: ChannelStats | None, fmt: PageFormat, what: str) -> None:
    """Raises FormatError where `stats` is missing for a quantised format or has other dimensions."""
    if fmt.is_raw:
        return
    if stats is None:
        raise FormatError(f"{what}: a quantised format needs channel statistics; calibrate, or use estimate_stats")
    if (stats.heads, stats.head_dim) != (fmt.heads, fmt.head_dim):
        raise FormatError(
            f"{what}: the statistics are of {stats.heads} heads x {stats.head_dim} channels, the format of "
            f"{fmt.heads} x {fmt.head_dim}; use those of this layer"
        )
