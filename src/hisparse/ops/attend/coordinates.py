"""Selection for a chunk in the sketches' own basis: what `select_for_chunk` is to become once it has run on a GPU.

The twin that serves rebuilds keys by scoring unit vectors, which took half of a chunk's time over recalled rows. Here a
kernel reads the codes. `hisparse bench prefill` measures both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.ops.attend import kernels
from hisparse.ops.attend.triton import LOG2E, Library, partial_attention
from hisparse.vtq.stats import ChannelStats


def select_for_chunk(
    sample: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float, count: int
) -> Tensor:
    """See :func:`hisparse.ops.attend.select_for_chunk`; `sample` [Hq, S, D] are the sampled queries.

    Keys and queries meet in the sketches' basis. Shares of attention do not change when the same vector is taken from
    all keys: less their mean, keys fit float16. One pass of fused attention gives every query's log-sum-exp, with which
    a second pass over the keys adds up the shares of rows without ever storing a score.
    """
    heads, dim = stats.heads, stats.head_dim
    keys = kernels.coordinates(codes, scales)
    width = 3 * codes.shape[3]
    basis = stats.query_basis[..., :width]
    queries = (sample.reshape(heads, -1, dim).float() @ basis * (scaling * LOG2E)).half()
    queries = torch.nn.functional.pad(queries, (0, keys.shape[2] - width)).contiguous()
    library: Library = "flash" if keys.is_cuda else "plain"
    _, lse = partial_attention(queries, keys, keys, 1 / LOG2E, library)
    worth = kernels.row_worth(keys, queries, lse.contiguous() * LOG2E, scales.shape[2])
    return worth.topk(count, sorted=False).indices
