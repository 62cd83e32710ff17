"""What TLIF is told about a token's surroundings: cheap statistics of the `prefix` rows before it.

All functions are linear in tokens and bounded in memory: tokens are taken in blocks of at most `prefix` queries, each
against the at most ``2 * prefix`` rows that its windows cover.
"""

from __future__ import annotations

import torch
from torch import Tensor

STATISTICS = (
    "log_norm",
    "window_fill",
    "mean_distance",
    "mean_similarity",
    "nearest_similarity",
    "similarity_spread",
    "duplicates",
    "previous_similarity",
    "relative_norm",
)
_DUPLICATE = 0.98  # cosine from which two rows count as the same token
_EPS = 1e-12


def window_statistics(values: Tensor, recent: Tensor, prefix: int) -> Tensor:
    """Statistics of each row against the rows before it.

    values [T, F] and recent [R <= prefix, F], float32: the new rows, and the rows just before them. Returns float32
    [T, len(STATISTICS)]. A row's window is the (at most `prefix`) rows before it. With u = x / |x|, w the window's rows:

    - ``log_norm``: ln |x|
    - ``window_fill``: rows in the window / prefix
    - ``mean_distance``: |u - mean(u_w)|
    - ``mean_similarity``, ``nearest_similarity``, ``similarity_spread``: mean, maximum and standard deviation of u . u_w
    - ``duplicates``: share of the window with u . u_w > 0.98
    - ``previous_similarity``: u . u of the row just before
    - ``relative_norm``: ln |x| - mean(ln |x_w|)

    Statistics of an empty window are 0.
    """
    tokens, features = values.shape
    if not tokens:
        return values.new_zeros((0, len(STATISTICS)))
    past = recent.shape[0]
    rows = torch.cat((recent, values)) if past else values
    log_norm = rows.square().sum(1).clamp_min(_EPS).log().mul_(0.5)
    unit = rows * log_norm.neg().exp().unsqueeze(1)
    block = min(prefix, tokens)
    blocks = -(-tokens // block)
    # Front padding gives each window `prefix` slots, back padding fills the last block. `real` marks true rows.
    front, back = prefix - past, blocks * block - tokens
    unit = torch.nn.functional.pad(unit, (0, 0, front, back))
    log_norm = torch.nn.functional.pad(log_norm, (front, back))
    real = torch.nn.functional.pad(unit.new_ones(rows.shape[0]), (front, back))
    # Query i of a block sees slots i .. i + prefix - 1 of the block's span.
    slot = torch.arange(prefix + block, device=unit.device) - torch.arange(block, device=unit.device).unsqueeze(1)
    band = (slot >= 0) & (slot < prefix)
    group = max(1, (1 << 22) // ((prefix + block) * (features + block)))  # blocks at a time: some 16 MiB of work space
    parts = []
    for start in range(0, blocks, group):
        count = min(group, blocks - start)
        low, high = start * block, (start + count) * block + prefix
        parts.append(_block_statistics(unit[low:high], log_norm[low:high], real[low:high], band, prefix, block))
    return torch.cat(parts)[:tokens] if len(parts) > 1 else parts[0][:tokens]


def _block_statistics(unit: Tensor, log_norm: Tensor, real: Tensor, band: Tensor, prefix: int, block: int) -> Tensor:
    """[count * block, S] for a stretch of `prefix` + count * block padded rows."""
    span = prefix + block
    keys = unit.unfold(0, span, block)  # [n, F, span], a view
    queries = unit[prefix:].view(-1, block, unit.shape[1])  # [n, block, F]
    mask = real.unfold(0, span, block).unsqueeze(1) * band  # [n, block, span], 1.0 in the window
    count = mask.sum(2)
    inverse = count.clamp_min(1).reciprocal()
    similarity = torch.bmm(queries, keys) * mask
    mean = similarity.sum(2) * inverse
    spread = (similarity.square().sum(2) * inverse - mean.square()).clamp_min(0).sqrt()
    centre = torch.bmm(mask, keys.transpose(1, 2)) * inverse.unsqueeze(2)  # [n, block, F]
    some = (count > 0).to(unit.dtype)
    nearest = similarity.masked_fill(mask == 0, -1).amax(2) * some
    own = log_norm[prefix:].view(-1, block)
    window_norm = torch.bmm(mask, log_norm.unfold(0, span, block).unsqueeze(2)).squeeze(2) * inverse
    columns = (
        own,
        count / prefix,
        (queries - centre).square().sum(2).sqrt() * some,
        mean,
        nearest,
        spread,
        (similarity > _DUPLICATE).sum(2) * inverse,
        (queries * unit[prefix - 1 : -1].view(-1, block, unit.shape[1])).sum(2),
        (own - window_norm) * some,
    )
    return torch.stack(columns, dim=2).flatten(0, 1)
