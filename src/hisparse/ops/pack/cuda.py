"""Packing with CUDA C++: the reference's bytes, at the speed of memory.

Serves bfloat16 and float16 in heads of 64, 128 or 256 channels and pages that a warp can hold; the rest is left to the
Triton twin.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hisparse.ops._cuda import FOLDER, load_kernel
from hisparse.ops.pack import reference
from hisparse.ops.pack import triton as twin
from hisparse.vtq.format import Fields, PageFormat
from hisparse.vtq.stats import ChannelStats

__all__ = ["FOLDER", "SOURCE", "macros", "pack_pages", "pack_tokens", "serves"]

SOURCE = "pack/pack.cu"
WARPS = 4


def serves(k: Tensor, v: Tensor, stats: ChannelStats, fmt: PageFormat) -> bool:
    """True for what the kernel packs."""
    if k.dtype not in (torch.bfloat16, torch.float16) or fmt.head_dim not in (64, 128, 256):
        return False
    lanes = fmt.tokens * fmt.head_dim // 32
    if fmt.tokens & (fmt.tokens - 1) or lanes > 32 or fmt.groups not in (1, 2, 4) or fmt.groups > lanes:
        return False
    if math.gcd(4, *(number for piece in stats.runs for number in piece)) != 4:
        return False
    return all(
        x.stride(3) == 1
        and x.data_ptr() % 8 == 0
        and all(stride % 4 == 0 and stride < 2**31 for stride in x.stride()[:3])
        for x in (k, v)
    )


def macros(fmt: PageFormat, dtype: torch.dtype, split: str, line: int | None = None) -> dict[str, int]:
    """What the source is compiled for. line: bytes from page to page where lists say what goes where."""
    defines = {
        "HEADS": fmt.heads,
        "DIM": fmt.head_dim,
        "TOKENS": fmt.tokens,
        "GROUPS": fmt.groups,
        "FLOAT16": int(dtype == torch.float16),
        "PAGE_BYTES": fmt.page_bytes if line is None else line,
        "INDEXED": int(line is not None),
    }
    fields: tuple[tuple[str, Fields], ...] = (("K", fmt.k), ("V", fmt.v))
    for name, field in fields:
        defines |= {
            f"{name}_BITS": field.bits,
            f"{name}_NIBBLES": field.nibbles,
            f"{name}_EXTRA": field.extra,
            f"{name}_SCALES": field.scales,
        }
    return defines | {"K_SPLIT": int(split == "rope" and fmt.k_bits == 5)}


def pack_pages(
    k: Tensor,
    v: Tensor,
    stats: ChannelStats | None,
    fmt: PageFormat,
    split: str,
    peak_threshold: float,
    faults: Tensor | None = None,
) -> Tensor:
    """See :func:`hisparse.ops.pack.pack_pages`. While a CUDA graph is captured bad values are not looked for."""
    peaks = split == "peaks" and 5 in (fmt.k_bits, fmt.v_bits)
    if fmt.raw_dtype is not None or peaks or stats is None or not len(k) or not serves(k, v, stats, fmt):
        pages: Tensor = twin.pack_pages(k, v, stats, fmt, split, peak_threshold, faults)
        return pages
    make = torch.zeros if twin.has_padding(fmt) else torch.empty
    pages = make(len(k), fmt.page_bytes, dtype=torch.uint8, device=k.device)
    bad = torch.zeros(1, dtype=torch.int32, device=k.device) if faults is None else faults
    _launch(k, v, stats, fmt, macros(fmt, k.dtype, split), len(k), None, None, pages, bad)
    capturing = torch.cuda.is_current_stream_capturing()
    if faults is None and not capturing and bool(bad):
        return reference.pack_pages(k, v, stats, fmt, split, peak_threshold)  # which says what is wrong, and where
    return pages


def pack_tokens(
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    stats: ChannelStats | None,
    fmt: PageFormat,
    split: str,
    peak_threshold: float,
    faults: Tensor,
    out: Tensor,
    places: Tensor,
) -> None:
    """See :func:`hisparse.ops.pack.pack_tokens`: one launch, whatever lies where."""
    peaks = split == "peaks" and 5 in (fmt.k_bits, fmt.v_bits)
    line = out.stride(0)
    fits = out.stride(1) == 1 and line % 4 == 0 and out.data_ptr() % 4 == 0 and not twin.has_padding(fmt)
    given = fmt.raw_dtype is None and not peaks and stats is not None
    if not given or not fits or stats is None or not serves(k[:, None], v[:, None], stats, fmt):
        reference.pack_tokens(k, v, tokens, stats, fmt, split, peak_threshold, faults, out, places, pack_pages)
        return
    defines = macros(fmt, k.dtype, split, line)
    _launch(k[None], v[None], stats, fmt, defines, len(tokens), tokens.contiguous(), places.contiguous(), out, faults)


def _launch(
    k: Tensor,
    v: Tensor,
    stats: ChannelStats,
    fmt: PageFormat,
    defines: dict[str, int],
    number: int,
    tokens: Tensor | None,
    places: Tensor | None,
    pages: Tensor,
    bad: Tensor,
) -> None:
    """k, v [n, P, H, D], or [1, N, H, D] with lists of tokens and places."""
    kernel = load_kernel(SOURCE, "pack", defines, device=k.device)
    together = 32 * 32 // (fmt.tokens * fmt.head_dim)  # pages a warp packs at once
    # As many programs as the device holds at once, rounded down: one left over would run alone.
    held = torch.cuda.get_device_properties(k.device.index).multi_processor_count * kernel.resident(32 * WARPS)
    wanted = -(-number // (together * WARPS))
    arguments = (k, v, stats.k_mean, stats.k_rate, stats.v_mean, stats.v_rate, stats.order, tokens, places)
    kernel(
        grid=(min(wanted, max(1, held // (2 * fmt.heads))), 2 * fmt.heads, 1),
        block=32 * WARPS,
        args=[*arguments, pages, bad, number, *k.stride()[:3], *v.stride()[:3]],
    )
