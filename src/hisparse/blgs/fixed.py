"""The baseline: blocks of one size, kept or set aside as a whole."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hisparse.blgs.plan import NO_MODE, BlockPlan
from hisparse.blgs.select import check_importance, check_limits, strongest
from hisparse.errors import InputError


def plan_fixed_blocks(
    importance: Tensor, block: int = 64, keep_limit: int | None = None, channels: int | None = None
) -> BlockPlan:
    """Keep the blocks of `block` tokens with the greatest mean importance, whole, within `keep_limit` tokens.

    Args:
        importance: float [T], strictly inside (0, 1).
        block: tokens (and channels) a block covers.
        keep_limit: most tokens kept; None keeps every block.
        channels: channels of one layer's K or V; `block` if not given.

    Returns:
        A plan without anchors and modes. Of equal blocks the earlier is kept; if the cut last block is among the
        chosen, the tokens it leaves over are not spent.

    Raises:
        FormatError, InputError: as `plan_blocks`; also block < 1.
    """
    if block < 1:
        raise InputError(f"block = {block}; give the tokens of a block, at least 1")
    channels = block if channels is None else channels
    check_limits(0.0, channels, keep_limit)
    p = check_importance(importance)
    length = p.shape[0]
    count = -(-length // block)
    start = torch.arange(count, device=p.device) * block
    tokens = torch.clamp(length - start, max=block)
    mean = pad(p, (0, count * block - length)).view(count, block).sum(1) / tokens
    chosen = strongest(mean, count if keep_limit is None or keep_limit >= length else keep_limit // block)
    keep = chosen.repeat_interleave(block)[:length]
    return BlockPlan(
        keep=keep,
        anchor=torch.zeros_like(keep),
        modes=torch.zeros(0, dtype=torch.int64, device=p.device),
        start=start,
        tokens=tokens,
        channel_width=torch.full_like(start, min(block, channels)),
        level=torch.zeros_like(start),
        kept=torch.where(chosen, tokens, 0),
        distance=torch.full_like(start, NO_MODE),
        channels=channels,
        min_block_size=block,
        demoted=0,
    )
