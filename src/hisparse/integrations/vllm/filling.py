"""Random but valid content for blocks that nobody computed, for benchmarks of decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.integrations.vllm.memory import LayerMemory

TOGETHER = 256
"""Blocks that are packed at a time."""
MARK = 64
"""Bytes of a block, its last ones, that tell whether it still holds what it was filled with."""


class Filling:
    """Packs random tokens into blocks of one layer, and knows which blocks still hold them.

    key_std: standard deviation of the keys, where the layer's statistics are the identity; values have 1.
    """

    def __init__(self, memory: LayerMemory, key_std: float = 1.0) -> None:
        self.memory, self.key_std = memory, key_std
        device = memory.blocks.device
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.marks = torch.zeros(len(memory.blocks), MARK, dtype=torch.uint8, device=device)
        self.kind = torch.zeros(len(memory.blocks), dtype=torch.uint8, device=device)  # 1: later block, 2: first block

    @torch.no_grad()
    def fill(self, blocks: list[int], first: bool) -> None:
        """Give random content to those of `blocks` that have none. first: they begin their sequences."""
        if not blocks:
            return
        ids = torch.tensor(blocks, device=self.marks.device)
        held = (self._marks(ids) == self.marks[ids]).all(1) & (self.kind[ids] == 1 + first)
        for some in torch.split(ids[~held], TOGETHER):
            self._pack(some, first)
            self.marks[some] = self._marks(some)
            self.kind[some] = 1 + first

    def _marks(self, ids: Tensor) -> Tensor:
        return self.memory.blocks[ids, -MARK:]

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
