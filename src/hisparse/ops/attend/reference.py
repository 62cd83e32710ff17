"""Attention over packed pages in plain torch: unpack what this layer needs now, attend, let it go."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hisparse.ops.attend import Packed
from hisparse.ops.sketch import score_sketch
from hisparse.ops.unpack import unpack_pages
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats


def _unpacked(
    packed: list[Packed], stats: ChannelStats | None, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """k, v [H, n * P, D] of each page format: pages of one format go together, for calls cost more than bytes."""
    by_format: dict[PageFormat, list[Tensor]] = {}
    for part in packed:
        if part.count:
            by_format.setdefault(part.fmt, []).append(part.read(device))
    parts = []
    for fmt, pages in by_format.items():
        k, v = unpack_pages(pages[0] if len(pages) == 1 else torch.cat(pages), stats, fmt, dtype)
        shape = (fmt.heads, -1, fmt.head_dim)
        parts.append((k.permute(2, 0, 1, 3).reshape(shape), v.permute(2, 0, 1, 3).reshape(shape)))
    return parts


def _causal_tail(chunk: int, total: int, device: torch.device) -> Tensor | None:
    """bool [chunk, total]: all of the past, and of the chunk (the last columns) what is not later than the query."""
    if chunk == 1:
        return None
    return torch.ones(chunk, total, dtype=torch.bool, device=device).tril_(total - chunk)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    packed: list[Packed],
    stats: ChannelStats | None,
    scaling: float,
) -> Tensor:
    parts = _unpacked(packed, stats, k.dtype, q.device)
    keys = torch.cat([*(p[0] for p in parts), dense_k, k], dim=1)
    values = torch.cat([*(p[1] for p in parts), dense_v, v], dim=1)
    chunk, total = q.shape[1], keys.shape[1]
    causal = chunk == total and chunk > 1
    out = scaled_dot_product_attention(
        q[None],
        keys[None],
        values[None],
        attn_mask=None if causal else _causal_tail(chunk, total, q.device),
        is_causal=causal,
        scale=scaling,
        enable_gqa=q.shape[0] != k.shape[0],
    )
    return out[0]


def attend_recalled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    kept: list[Packed],
    recalled: Packed,
    stats: ChannelStats,
    scaling: float,
) -> Tensor:
    parts = _unpacked(kept, stats, torch.float32, q.device)
    keys = torch.cat([*(p[0] for p in parts), dense_k.float(), k.float()], dim=1)
    values = torch.cat([*(p[1] for p in parts), dense_v.float(), v.float()], dim=1)
    (q_heads, chunk, dim), heads = q.shape, k.shape[0]
    grouped = q.float().view(heads, q_heads // heads, chunk, dim) * scaling
    shared = torch.einsum("hgtd,hnd->hgtn", grouped, keys)
    mask = _causal_tail(chunk, keys.shape[1], q.device)
    if mask is not None:
        shared.masked_fill_(~mask, float("-inf"))
    assert isinstance(recalled.pages, Tensor)
    pages = recalled.pages.flatten(0, 1)
    own_k, own_v = unpack_pages(pages, stats, recalled.fmt, torch.float32)  # [T * n, R, H, D]
    own_k = own_k.reshape(chunk, -1, heads, dim)
    own_v = own_v.reshape(chunk, -1, heads, dim)
    own = torch.einsum("hgtd,tnhd->hgtn", grouped, own_k)
    weights = torch.cat([shared, own], dim=-1).softmax(-1)
    w_shared, w_own = weights[..., : shared.shape[-1]], weights[..., shared.shape[-1] :]
    out = torch.einsum("hgtn,hnd->hgtd", w_shared, values) + torch.einsum("hgtn,tnhd->hgtd", w_own, own_v)
    return out.reshape(q_heads, chunk, dim).to(q.dtype)


SCORES = 1 << 24
"""float32 scores of sketches held at a time."""


def select_for_chunk(
    sample: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float, count: int
) -> Tensor:
    """See :func:`hisparse.ops.attend.select_for_chunk`; `sample` [Hq, S, D] are the sampled queries."""
    rows, _, row_size = scales.shape
    step = max(1, SCORES // (sample.shape[0] * row_size * rows))
    worth = torch.zeros(rows, device=sample.device)
    for queries in torch.split(sample, step, dim=1):
        share = score_sketch(queries, codes, scales, stats, scaling).softmax(-1)
        worth += share.view(*share.shape[:2], rows, row_size).sum(-1).sqrt_().sum((0, 1))
    return worth.topk(count, sorted=False).indices
