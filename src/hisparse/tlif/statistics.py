"""What TLIF is told about a token's surroundings: cheap statistics of the `prefix` rows before it.

All functions are linear in tokens and bounded in memory: tokens are taken in blocks of at most `prefix` queries, each
against the at most ``2 * prefix`` rows that its windows cover, so that the work is matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor

STATISTICS = (
    "log_norm",
    "mean_distance",
    "mean_similarity",
    "nearest_similarity",
    "previous_similarity",
    "relative_norm",
)
_EPS = 1e-12
_OUTSIDE = -2.0  # below any cosine: what lies outside a window is nobody's nearest
_GROUP_VALUES = 1 << 21  # float32 values of work space at a time (8 MiB, which a CPU's cache holds) ...
_GROUP_VALUES_CUDA = 1 << 25  # ... and on a GPU, which needs long launches


def previous_rows(values: Tensor, recent: Tensor) -> Tensor:
    """The row before each row of values [T, F], which follow recent [R, F]: [T, F], zeros before all."""
    before = recent[-1:] if recent.shape[0] else values.new_zeros((1, values.shape[1]))
    return torch.cat((before, values[:-1]))[: values.shape[0]]


def network_inputs(values: Tensor, recent: Tensor, prefix: int) -> Tensor:
    """What the network reads, float32 [T, 2 F + statistics]: value row, the row before it, window statistics."""
    return torch.cat((values, previous_rows(values, recent), window_statistics(values, recent, prefix)), dim=1)


def window_statistics(values: Tensor, recent: Tensor, prefix: int) -> Tensor:
    """Statistics of each row against the rows before it.

    values [T, F] and recent [R <= prefix, F], float32: the new rows, and the rows just before them. Returns float32
    [T, len(STATISTICS)]. A row's window is the (at most `prefix`) rows before it. With u = x / |x| and w for the
    window's rows:

    - ``log_norm``: ln |x|
    - ``mean_distance``: |u - mean(u_w)|
    - ``mean_similarity``: mean of u . u_w
    - ``nearest_similarity``: largest u . u_w, at least 0
    - ``previous_similarity``: u . u of the row just before
    - ``relative_norm``: ln |x| - mean(ln |x_w|)

    Against an empty window the distances and similarities are those to a zero row, and ``relative_norm`` is 0.
    """
    tokens, features = values.shape
    if not tokens:
        return values.new_zeros((0, len(STATISTICS)))
    past = recent.shape[0]
    if tokens == 1 and past:
        return _single_statistics(values, recent)
    rows = torch.cat((recent, values))
    log_norm = rows.square().sum(1).clamp_min(_EPS).log().mul_(0.5)
    unit = rows * log_norm.neg().exp().unsqueeze(1)
    block = min(prefix, tokens)
    blocks = -(-tokens // block)
    # Front padding gives each window `prefix` slots, back padding fills the last block. Padded rows are zero: they add
    # nothing to the sums, and a similarity of 0 to the nearest.
    front, back = prefix - past, blocks * block - tokens
    if front or back:
        unit = torch.nn.functional.pad(unit, (0, 0, front, back))
        log_norm = torch.nn.functional.pad(log_norm, (front, back))
    count = torch.arange(past, past + blocks * block, device=unit.device, dtype=unit.dtype).clamp_max_(prefix)
    # Query i of a block sees slots i .. i + prefix - 1 of the block's span.
    slot = torch.arange(prefix + block, device=unit.device) - torch.arange(block, device=unit.device).unsqueeze(1)
    band = ((slot >= 0) & (slot < prefix)).to(unit.dtype)
    room = _GROUP_VALUES_CUDA if unit.is_cuda else _GROUP_VALUES
    group = max(1, room // ((prefix + block) * (features + block)))
    parts = []
    for start in range(0, blocks, group):
        low, high = start * block, min(start + group, blocks) * block
        stretch = slice(low, high + prefix)
        parts.append(_stretch_statistics(unit[stretch], log_norm[stretch], count[low:high], band, prefix))
    return torch.cat(parts)[:tokens] if len(parts) > 1 else parts[0][:tokens]


def _single_statistics(values: Tensor, recent: Tensor) -> Tensor:
    """[1, statistics] of the one row of values [1, F] whose whole window is recent [R, F]: a decode step."""
    norms = torch.cat((recent, values)).square().sum(1).clamp_min_(_EPS).sqrt_()
    unit = recent / norms[:-1].unsqueeze(1)
    query = values[0] / norms[-1]
    centre = unit.mean(0)
    similarity = unit @ query
    logs = norms.log()
    columns = (
        logs[-1],
        (query - centre).square().sum().sqrt(),
        similarity.mean(),
        similarity.max().clamp_min(0),
        similarity[-1],
        logs[-1] - logs[:-1].mean(),
    )
    return torch.stack(columns).unsqueeze(0)


def _stretch_statistics(unit: Tensor, log_norm: Tensor, count: Tensor, band: Tensor, prefix: int) -> Tensor:
    """[N, statistics] of N = n * block queries; unit [prefix + N, F], log_norm [prefix + N], count [N]."""
    block, span = band.shape
    keys = unit.unfold(0, span, block)  # [n, F, span], a view
    queries = unit[prefix:]  # [N, F]
    inverse = count.clamp_min(1).reciprocal()
    outside = ((1 - band) * _OUTSIDE).expand(keys.shape[0], block, span)
    nearest = torch.baddbmm(outside, queries.view(-1, block, unit.shape[1]), keys).amax(2).clamp_min_(0).flatten()
    centre = torch.matmul(band, keys.transpose(1, 2)).flatten(0, 1) * inverse.unsqueeze(1)
    own = log_norm[prefix:]
    window_norm = (log_norm.unfold(0, span, block) @ band.T).flatten() * inverse
    columns = (
        own,
        (queries - centre).square().sum(1).sqrt(),
        (queries * centre).sum(1),
        nearest,
        (queries * unit[prefix - 1 : -1]).sum(1),
        (own - window_norm) * (count > 0),
    )
    return torch.stack(columns, dim=1)
