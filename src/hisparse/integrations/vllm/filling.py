"""Random but valid content for blocks that nobody computed, for benchmarks of decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.integrations.vllm.memory import LayerMemory

TOGETHER = 256
"""Blocks that are packed at a time."""


class Filling:
    """Packs random tokens into blocks of one layer, and knows which blocks still hold them.

    key_std: standard deviation of the keys, where the layer's statistics are the identity; values have 1.
    """

    def __init__(self, memory: LayerMemory, key_std: float = 1.0) -> None:
        self.memory, self.key_std = memory, key_std
        device = memory.blocks.device
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.sums = torch.zeros(len(memory.blocks), dtype=torch.int64, device=device)
        words = memory.blocks.shape[1] // 4
        self.factors = torch.randint(1 << 62, (words,), generator=self.generator, device=device) * 2 + 1
        self.kind = torch.zeros(len(memory.blocks), dtype=torch.uint8, device=device)  # 1: later block, 2: first block

    @torch.no_grad()
    def fill(self, blocks: list[int], first: bool) -> None:
        """Give random content to those of `blocks` that have none. first: they begin their sequences."""
        if not blocks:
            return
        for some in torch.split(torch.tensor(blocks, device=self.sums.device), TOGETHER):
            held = (self._sums(some) == self.sums[some]) & (self.kind[some] == 1 + first)
            lost = some[~held]
            if len(lost):
                self._pack(lost, first)
                self.sums[lost] = self._sums(lost)
                self.kind[lost] = 1 + first

    def _sums(self, ids: Tensor) -> Tensor:
        """int64 [n]: of all words of each block, since a request's newest tokens may have lain anywhere in it."""
        return (self.memory.blocks[ids].view(torch.int32) * self.factors).sum(1)

    def _pack(self, ids: Tensor, first: bool) -> None:
        memory, layout = self.memory, self.memory.layout
        shape = (len(ids), layout.tokens, layout.heads, layout.head_dim)
        k, v = (torch.randn(shape, generator=self.generator, device=ids.device) for _ in range(2))
        k *= self.key_std
        if memory.stats is not None:
            k, v = k * memory.stats.k_scale + memory.stats.k_mean, v * memory.stats.v_scale + memory.stats.v_mean
        counts = layout.first if first else layout.other
        order = torch.rand(len(ids), layout.tokens, generator=self.generator, device=ids.device)
        if first:
            order[:, : layout.head] = -1.0
        best = order.topk(counts.pages * layout.page.tokens, dim=1).indices
        kept = torch.zeros_like(order, dtype=torch.bool).scatter_(1, best, True)
        memory.pack(k.to(layout.dtype), v.to(layout.dtype), ids, kept, first)
