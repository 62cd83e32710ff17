"""Quantise K and V into pages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops._dispatch import select_backend
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

__all__ = ["pack_pages", "pack_tokens"]

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


def pack_tokens(
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    stats: ChannelStats | None,
    fmt: PageFormat,
    split: Split,
    peak_threshold: float,
    faults: Tensor,
    out: Tensor,
    places: Tensor,
) -> None:
    """Pack tokens that lie anywhere to pages that lie anywhere. A kernel waits for nothing; what none packs, does.

    k, v: [N, H, D]; tokens: int64 [n, P], which of them are a page's; out: uint8 [lines, page_bytes], lines any
    distance apart; places: int64 [n], each line at most once. faults: int32 [1], counts blocks that hold inf, NaN
    or what is beyond the range of the format; their pages mean nothing. The rest as :func:`pack_pages`, which gives the
    same bytes. Raises FormatError for shapes that do not fit `fmt`.
    """
    shape = (fmt.heads, fmt.head_dim)
    if k.dim() != 3 or tuple(k.shape[1:]) != shape or k.shape != v.shape or k.dtype != v.dtype:
        raise FormatError(
            f"pack_tokens: k is {k.dtype} {list(k.shape)}, v {v.dtype} {list(v.shape)}; this format takes "
            f"[N, {shape[0]}, {shape[1]}], both alike"
        )
    if tokens.dim() != 2 or tokens.shape[1] != fmt.tokens or tuple(places.shape) != (len(tokens),):
        raise FormatError(
            f"pack_tokens: lists of {list(tokens.shape)} tokens and {list(places.shape)} places; give "
            f"[n, {fmt.tokens}] and [n]"
        )
    if out.dtype != torch.uint8 or out.dim() != 2 or out.shape[1] != fmt.page_bytes:
        raise FormatError(f"pack_tokens: out is {out.dtype} {list(out.shape)}; give uint8 [lines, {fmt.page_bytes}]")
    check_stats(stats, fmt, "pack_tokens")
    if len(tokens):
        select_backend("pack", k.device).pack_tokens(
            k, v, tokens, stats, fmt, split, peak_threshold, faults, out, places
        )


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
