"""FlashAttention 3, where another package brings it: PyTorch has none of its own.

It serves chunks and slices of any length without planning, grouped heads without copies, and causal masks at full speed
(Shah et al. 2024). vLLM's CUDA wheel has it; the plugin hands it over when an engine starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Varlen = Callable[..., tuple[Tensor, Tensor]]
"""``f(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale=, causal=, out=,
return_softmax_lse=True)`` with q [T, Hq, D], k and v [N, H, D]; gives out [T, Hq, D] and float32 [Hq, T]."""

_FUNCTION: list[Varlen] = []


def use(function: Varlen | None) -> None:
    """Attend with `function` from now on; None: without one."""
    _FUNCTION[:] = [] if function is None else [function]


def serves(q: Tensor) -> bool:
    """True where there is one and it takes queries like `q` [..., D]."""
    dim = q.shape[-1]
    return bool(_FUNCTION) and q.dtype in (torch.float16, torch.bfloat16) and dim % 8 == 0 and dim <= 256


@lru_cache(maxsize=256)
def _ends(tokens: int, device: torch.device) -> Tensor:
    """int32 [2]: where the one sequence begins and ends."""
    return torch.tensor([0, tokens], dtype=torch.int32, device=device)


def attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of q [Hq, T, D] over k, v [H, N, D]: [Hq, T, D] strided as q is, and float32 [Hq, T], its natural
    log-sum-exp. causal: N is T, and a query sees no later key."""
    out: Any = torch.empty_like(q)
    tokens, keys = q.shape[1], k.shape[1]
    _, lse = _FUNCTION[0](
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), tokens, _ends(tokens, q.device), keys,
        _ends(keys, q.device), softmax_scale=scaling, causal=causal, out=out.transpose(0, 1), return_softmax_lse=True,
    )  # fmt: skip
    return out, lse
