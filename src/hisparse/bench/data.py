"""Keys and values as models have them: channels with large constant offsets and unequal spread, and a few needles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.bench.shapes import Shape
from hisparse.ops.pack import pack_pages
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats, estimate_stats

CHUNK = 1 << 16


@dataclass
class Layer:
    """K and V [H, N, D] of one layer in bfloat16, q [Hq, D] that turns to the needles, and the layer's statistics."""

    q: Tensor
    k: Tensor
    v: Tensor
    stats: ChannelStats

    @property
    def context(self) -> int:
        return self.k.shape[1]

    def pack(self, fmt: PageFormat, first: int = 0, tokens: int | None = None) -> Tensor:
        """Pages uint8 [tokens / P, page_bytes] of `tokens` tokens from `first` on, K split by RoPE frequency."""
        end = self.context if tokens is None else first + tokens
        pages = []
        for at in range(first, end, CHUNK):
            k, v = (pages_of(x[:, at : min(at + CHUNK, end)], fmt.tokens) for x in (self.k, self.v))
            pages.append(pack_pages(k, v, self.stats, fmt, "rope"))
        return torch.cat(pages)


def pages_of(x: Tensor, tokens: int) -> Tensor:
    """x [H, n * tokens, D] as pages [n, tokens, H, D], a view."""
    return x.view(len(x), -1, tokens, x.shape[2]).permute(1, 2, 0, 3)


def rope_order(dim: int) -> Tensor:
    """int64 [D]: channels by half-split RoPE frequency, the slow half first."""
    return torch.argsort(torch.arange(dim) // (dim // 4) % 2, descending=True, stable=True)


def make_layer(shape: Shape, context: int, device: torch.device, seed: int = 1) -> Layer:
    """A layer of `context` tokens."""
    heads, dim = shape.heads, shape.dim
    make = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=make, device=device)

    offset, spread = normal(2, heads, 1, dim) * 0.5, (normal(2, heads, 1, dim) * 0.5).exp()
    offset[0, :, :, ::9] *= 20
    q = normal(shape.q_heads, dim)
    toward = q.view(heads, -1, dim).mean(1)
    k, v = (torch.empty(heads, context, dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    for start in range(0, context, CHUNK):
        count = min(CHUNK, context - start)
        new_k, new_v = (normal(heads, count, dim) * spread[i] + offset[i] for i in range(2))
        new_k[:, :: CHUNK // 4] += 2 * toward[:, None]
        k[:, start : start + count], v[:, start : start + count] = new_k, new_v
    sample_k, sample_v = (x[:, : min(context, 32768)].transpose(0, 1) for x in (k, v))
    return Layer(q.to(torch.bfloat16), k, v, estimate_stats(sample_k, sample_v, rope_order(dim)))


def float64_attention(q: Tensor, slices: list[tuple[Tensor, Tensor]], scaling: float) -> Tensor:
    """Attention of q [H, M, D] over all slices of K and V [H, n, D], in float64: the oracle of the benchmarks."""
    parts = []
    for k, v in slices:
        scores = q.double() @ k.double().mT * scaling
        lse = scores.logsumexp(-1)
        parts.append((lse, (scores - lse[..., None]).exp() @ v.double()))
    weights = torch.stack([lse for lse, _ in parts]).softmax(0)
    return (weights[..., None] * torch.stack([out for _, out in parts])).sum(0)
