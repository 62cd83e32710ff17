"""Importance with the texture of a real text, for trying plans without a model."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import InputError


def synthetic_importance(tokens: int, seed: int = 0, share: float = 0.035) -> Tensor:
    """Importance float32 [T] that looks like a real text's: topics wax and wane, and names come in clumps.

    Three scales are multiplied: stretches of about a thousand tokens that hold much or little, phrases of about ten
    tokens within them, and single tokens. Scaled so that about `share` of the tokens reach 0.32. Deterministic.
    """
    if tokens < 0:
        raise InputError(f"tokens = {tokens}; give the length of the sequence, at least 0")
    if tokens == 0:
        return torch.zeros(0)
    draw = torch.Generator().manual_seed(seed)

    def field(scale: int) -> Tensor:
        knots = torch.randn(tokens // scale + 2, generator=draw)
        at = torch.arange(tokens) / scale
        low = at.long()
        mix = (1 - torch.cos((at - low) * torch.pi)) / 2
        return (knots[low] * (1 - mix) + knots[low + 1] * mix) / (1 - 2 * mix * (1 - mix)).sqrt()

    logit = 1.3 * field(900) + 1.0 * field(9) + 0.7 * torch.randn(tokens, generator=draw)
    cut = logit.kthvalue(max(1, min(tokens, round(tokens * (1 - share))))).values
    return torch.sigmoid(logit - cut - 0.7538).clamp(1e-6, 1 - 1e-6)  # logit(0.32) = -0.7538
