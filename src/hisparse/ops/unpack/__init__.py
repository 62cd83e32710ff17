"""Read K and V back from pages."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops._dispatch import select_backend
from hisparse.ops.pack import check_stats
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

__all__ = ["unpack_into", "unpack_pages"]


def unpack_pages(
    pages: Tensor, stats: ChannelStats | None, fmt: PageFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values [n, P, H, D] in `dtype`, denormalised and in channel order, of pages uint8 [n, page_bytes].

    The result is a view of memory laid out [H, n, P, D]: ``k.permute(2, 0, 1, 3).reshape(H, n * P, D)``, what attention
    wants, copies nothing. Raises FormatError for pages or statistics that do not fit `fmt`.
    """
    _check_pages("unpack_pages", pages, stats, fmt)
    result: tuple[Tensor, Tensor] = select_backend("unpack", pages.device).unpack_pages(pages, stats, fmt, dtype)
    return result


def unpack_into(
    pages: Tensor, stats: ChannelStats | None, fmt: PageFormat, k: Tensor, v: Tensor, ids: Tensor | None = None
) -> None:
    """As `unpack_pages`, into k and v [H, n * P, D] of one dtype and equal strides, the last of them 1.

    ids: int64 [n], which pages, on their device; None for all of them. Raises FormatError for shapes that do not fit.
    """
    _check_pages("unpack_into", pages, stats, fmt)
    count = len(pages) if ids is None else len(ids)
    shape = (fmt.heads, count * fmt.tokens, fmt.head_dim)
    if tuple(k.shape) != shape or tuple(v.shape) != shape or k.stride() != v.stride() or k.dtype != v.dtype:
        raise FormatError(
            f"unpack_into: k is {k.dtype} {list(k.shape)}, v {v.dtype} {list(v.shape)}; "
            f"{count} pages need {list(shape)} of one dtype and equal strides"
        )
    select_backend("unpack", pages.device).unpack_into(pages, stats, fmt, k, v, ids)


def _check_pages(what: str, pages: Tensor, stats: ChannelStats | None, fmt: PageFormat) -> None:
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != fmt.page_bytes:
        raise FormatError(
            f"{what}: pages are {pages.dtype} {list(pages.shape)}; this format has uint8 [n, {fmt.page_bytes}]"
        )
    check_stats(stats, fmt, what)
