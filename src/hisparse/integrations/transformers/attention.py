"""The attention function and mask function that transformers calls under the name `hisparse`.

A HiSparse layer's `update()` returns only the new keys and values, with a handle to the layer on the key tensor. The
attention function finds the handle and lets the layer attend and commit. Without a handle (another cache, no cache, a
sliding-window layer) it computes stock scaled-dot-product attention, so one model object serves both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from hisparse.errors import UnsupportedError

if TYPE_CHECKING:
    from hisparse.integrations.transformers.cache import HiSparseLayer

NAME = "hisparse"
HANDLE = "_hisparse_layer"
# Arguments of other models' attention that change its result. Ignoring one would give wrong text without a word.
CHANGES_SCORES = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "indices", "cu_seq_lens_q")


def register() -> None:
    """Register the functions below; calling it again changes nothing."""
    AttentionInterface.register(NAME, hisparse_attention)
    AttentionMaskInterface.register(NAME, hisparse_mask)


def hisparse_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None for a purely causal mask, the bool [B, kv_length] padding mask where there is padding, else sdpa's 4-D mask.

    The 2-D form is what a HiSparse layer reads: a 4-D mask over a million positions would be larger than the cache.
    """
    causal = mask_function is causal_mask_function and isinstance(q_offset, int)
    if not causal or q_offset + q_length != kv_length + kv_offset:
        # No mask may mean causal only where both of sdpa's alignments of the diagonal agree (not with a static cache).
        skip = kwargs.pop("allow_is_causal_skip", True) and q_length in (1, kv_length)
        return sdpa_mask(  # type: ignore[no-any-return]
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=skip,
            **kwargs,
        )
    # A mask of a wrong length is passed on, even one without padding: a HiSparse layer refuses it.
    if attention_mask is None or (attention_mask.shape[-1] == kv_length + kv_offset and bool(attention_mask.all())):
        return None
    return attention_mask


def _mask_4d(mask: Tensor | None, causal: bool, chunk: int, total: int, device: torch.device) -> Tensor | None:
    """The bool [B, 1, T, N] form of what `hisparse_mask` returned.

    Rows that see nothing see everything (and are discarded). None stays None where sdpa's own causal flag means the
    same (it aligns the diagonal to the upper left), and where the module is not `causal`, as cross-attention.
    """
    if mask is not None and mask.ndim == 4:
        return mask
    if mask is None and (chunk in (1, total) or not causal):
        return None
    past = torch.ones(chunk, total, dtype=torch.bool, device=device).tril_(total - chunk)
    if mask is None:
        return past[None, None]
    visible = torch.nn.functional.pad(mask, (0, max(0, total - mask.shape[1])))  # as transformers pads a mask too short
    full = past[None, None] & visible[:, None, None, -total:].bool()
    return full | ~full.any(-1, keepdim=True)


def hisparse_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer. query [B, Hq, T, D]; key, value [B, H, T or N, D]; returns [B, T, Hq, D].

    Raises UnsupportedError for arguments and masks that a HiSparse layer cannot honour.
    """
    layer: HiSparseLayer | None = getattr(key, HANDLE, None)
    if layer is None:
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        mask = _mask_4d(attention_mask, causal, query.shape[2], key.shape[2], query.device)
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    layer.waiting = False
    for name in CHANGES_SCORES:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} passes {name} to attention, which HiSparse does not implement; "
                "use the stock cache"
            )
    if dropout > 0.0:
        raise UnsupportedError(f"attention dropout {dropout} with a HiSparse cache; call model.eval() first")
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions: HiSparse never forms the attention matrix; use the stock cache for it"
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UnsupportedError(
            f"a custom attention mask of shape {tuple(attention_mask.shape)}; HiSparse attends causally, with a 2-D "
            "padding mask"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return layer.attend_and_commit(query, key, value, attention_mask, scaling), None
