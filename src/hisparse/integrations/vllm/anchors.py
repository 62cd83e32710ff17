"""The anchor hit rate: how much of what decoding attends to was at hand, kept or dense, and needed no recall."""

from __future__ import annotations

import torch
from torch import Tensor

MEASURE_EVERY = 16
"""On a CPU one query of so many is measured, for which its attention is computed a second time."""


class AnchorShare:
    """Attention mass of one layer's decode steps that fell on sinks, tail and kept tokens; counted on the device.

    sums: float64 [2], the shares of all queries that recalled something, each averaged over its heads, and how many.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.seen = 0

    def due(self) -> bool:
        """True for one query of MEASURE_EVERY."""
        self.seen += 1
        return self.seen % MEASURE_EVERY == 1

    def add(self, lse: Tensor, recalled_lse: Tensor, number: Tensor) -> None:
        """Count a step.

        lse, recalled_lse: float32 [B, Hq], log-sum-exp of all scores, and of those of recalled rows alone. number:
        int32 [B], rows that each request recalled.
        """
        share = 1 - (recalled_lse - lse).exp().mean(1, dtype=torch.float64)
        counts = number > 0
        self.sums += torch.stack([torch.where(counts, share, 0.0).sum(), counts.sum().double()])
