"""Decode attention in plain torch: unpack every page a sequence may have, mask what it has not, attend.

Computes in float64 where q is float64, else in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops.decode.types import DecodeResult, Pages
from hisparse.ops.unpack import unpack_pages
from hisparse.vtq.stats import ChannelStats


def _unpack(pages: Pages, stats: ChannelStats | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """k, v [B, H, max_pages * P, D] and which tokens are there, bool [B, max_pages * P]."""
    batch, width = pages.table.shape
    fmt = pages.fmt
    used = torch.arange(width, device=pages.table.device) < pages.count[:, None]  # [B, max_pages]
    ids = torch.where(used, pages.table, 0).flatten().long()
    k, v = (
        x.view(batch, width * fmt.tokens, fmt.heads, fmt.head_dim).transpose(1, 2)
        for x in (y.contiguous() for y in unpack_pages(pages.pool[ids], stats, fmt, dtype))
    )
    seen = used.repeat_interleave(fmt.tokens, 1)
    # Pages that are not in use may hold anything, and zero times NaN is NaN.
    return k.masked_fill(~seen[:, None, :, None], 0), v.masked_fill(~seen[:, None, :, None], 0), seen


def decode_attention(
    q: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    dense_len: Tensor,
    kept: Pages | None,
    recalled: Pages | None,
    stats: ChannelStats | None,
    scaling: float,
    extra_logit: Tensor | None,
    extra_value: Tensor | None,
    page_mass: bool,
    split: str | None,
    out: Tensor | None = None,
) -> DecodeResult:
    """See :func:`hisparse.ops.decode.decode_attention`. `split` is not needed: the pages say it themselves."""
    batch, q_heads, dim = q.shape
    heads, slots = dense_k.shape[1], dense_k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(dtype).view(batch, heads, q_heads // heads, dim) * scaling
    seen = torch.arange(slots, device=q.device) < dense_len[:, None]
    keys = [dense_k.to(dtype).masked_fill(~seen[:, None, :, None], 0)]
    values = [dense_v.to(dtype).masked_fill(~seen[:, None, :, None], 0)]
    masks = [seen]
    parts = [pages if pages is not None and pages.pool.shape[0] else None for pages in (kept, recalled)]
    for pages in parts:
        if pages is not None:
            k, v, used = _unpack(pages, stats, dtype)
            keys.append(k)
            values.append(v)
            masks.append(used)
    mask = torch.cat(masks, 1)[:, None, None]
    scores = torch.einsum("bhgd,bhnd->bhgn", grouped, torch.cat(keys, 2)).masked_fill(~mask, float("-inf"))
    if extra_logit is not None and extra_value is not None:
        scores = torch.cat([scores, extra_logit.to(dtype).view(batch, heads, q_heads // heads, -1)], -1)
        values.append(extra_value.to(dtype))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()
    found = torch.einsum("bhgn,bhnd->bhgd", weights, torch.cat(values, 2)).reshape(batch, q_heads, dim).to(q.dtype)
    out = found if out is None else out.copy_(found)
    masses: list[Tensor | None] = []
    start = slots
    for pages in parts:
        if pages is None or not page_mass:
            masses.append(None)
            continue
        width, tokens = pages.table.shape[1], pages.fmt.tokens
        own = scores[..., start : start + width * tokens].reshape(batch, q_heads, width, tokens)
        masses.append(own.logsumexp(-1).float())
        start += width * tokens
    return DecodeResult(out, lse.reshape(batch, q_heads).float(), masses[0], masses[1])
