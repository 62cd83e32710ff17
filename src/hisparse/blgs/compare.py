"""How much importance a plan keeps per token, beside the alternatives at the same number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.blgs.fixed import plan_fixed_blocks
from hisparse.blgs.plan import BlockPlan
from hisparse.blgs.select import check_importance, strongest


@dataclass(frozen=True)
class Coverage:
    """`kept` tokens that together hold the share `mass` (0 to 1) of all importance."""

    kept: int
    mass: float


def coverage(keep: Tensor, importance: Tensor) -> Coverage:
    """Coverage of a mask bool [T] over importance float [T], summed in float64."""
    p = importance.double()
    total = float(p.sum())
    return Coverage(int(keep.sum()), float(p[keep].sum()) / total if total else 0.0)


def tokens_fixed_blocks_need(importance: Tensor, mass: float, block: int = 64) -> int:
    """Tokens that whole blocks of `block` tokens, best first, must keep to cover the share `mass` of importance."""
    plan = plan_fixed_blocks(importance, block)
    if plan.n_blocks == 0 or mass <= 0:
        return 0
    p = importance.double()
    sums = torch.zeros(plan.n_blocks, dtype=torch.float64, device=p.device)
    sums.index_add_(0, torch.arange(plan.length, device=p.device) // block, p)
    order = (sums / plan.tokens).argsort(descending=True, stable=True)
    covered = sums[order].cumsum(0)
    blocks = int(torch.searchsorted(covered, mass * covered[-1] * (1 - 1e-12))) + 1
    return int(plan.tokens[order[:blocks]].sum())


def compare(plan: BlockPlan, importance: Tensor, block: int = 64) -> dict[str, Coverage]:
    """Coverage of `plan` and, with as many tokens at most, of fixed blocks, of the tokens alone, and of chance.

    ``tokens`` (the most important ones, no blocks) is the ceiling of any choice; ``fixed, equal mass`` says what fixed
    blocks need to cover as much as the plan.
    """
    p = check_importance(importance)
    ours = coverage(plan.keep, p)
    fixed = plan_fixed_blocks(p, block, ours.kept)
    return {
        "plan": ours,
        "fixed": coverage(fixed.keep, p),
        "fixed, equal mass": Coverage(tokens_fixed_blocks_need(p, ours.mass, block), ours.mass),
        "tokens": coverage(strongest(p, ours.kept), p),
        "chance": Coverage(ours.kept, plan.density),
    }
