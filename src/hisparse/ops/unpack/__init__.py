"""Read K and V back from pages."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops._dispatch import select_backend
from hisparse.ops.pack import check_stats
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats

__all__ = ["unpack_pages"]


def unpack_pages(
    pages: Tensor, stats: ChannelStats | None, fmt: PageFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values [n, P, H, D] in `dtype`, denormalised and in channel order, of pages uint8 [n, page_bytes].

    The result is a view of memory laid out [H, n, P, D]: ``k.permute(2, 0, 1, 3).reshape(H, n * P, D)``, what attention
    wants, copies nothing. Raises FormatError for pages or statistics that do not fit `fmt`.
    """
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != fmt.page_bytes:
        raise FormatError(
            f"unpack_pages: pages are {pages.dtype} {list(pages.shape)}; this format has uint8 [n, {fmt.page_bytes}]"
        )
    check_stats(stats, fmt, "unpack_pages")
    result: tuple[Tensor, Tensor] = select_backend("unpack", pages.device).unpack_pages(pages, stats, fmt, dtype)
    return result
