"""Watch a model's attention: K, V and sampled queries of every full-attention layer, or the effect of changed K, V.

The probe is an attention function of its own, registered under `hisparse-probe` through the interface transformers
offers and chosen for the length of one forward; nothing of the model is patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAME = "hisparse-probe"


@dataclass
class LayerView:
    """What a layer's attention was given, one sequence: k, v [T, H, D], sampled queries q [Hq, S, D], and its
    scaling."""

    k: Tensor
    v: Tensor
    q: Tensor
    scaling: float


Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Probe:
    """Queries to take along (`positions` int64 [S]), or `change(layer, k, v) -> k', v'` that queries from `change_from`
    on attend to, in place of k, v [T, H, D]."""

    positions: Tensor | None = None
    change: Change | None = None
    change_from: int = 0
    layers: dict[int, LayerView] = field(default_factory=dict)


_active: ContextVar[Probe] = ContextVar("hisparse_probe")


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    probe = _active.get()
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if getattr(module, "sliding_window", None):
        return out, None
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if probe.positions is not None:
        queries = query[0][:, probe.positions].float()
        probe.layers[module.layer_idx] = LayerView(k.float(), v.float(), queries, scaling)
    if probe.change is not None:
        start, length = probe.change_from, key.shape[2]
        k, v = (x.to(key.dtype).transpose(0, 1)[None] for x in probe.change(module.layer_idx, k, v))
        mask = torch.ones(length - start, length, dtype=torch.bool, device=key.device).tril_(start)
        tail = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:], k, v, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        out = torch.cat([out[:, :start], tail.transpose(1, 2)], 1)
    return out, None


@contextmanager
def watching(model: Any, probe: Probe) -> Iterator[None]:
    """Run forwards of `model` (batch 1, no cache) under `probe`; its attention implementation is restored
    afterwards."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    token = _active.set(probe)
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        _active.reset(token)
