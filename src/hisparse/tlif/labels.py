"""What a frozen model says about its own tokens: the labels on which TLIF is distilled.

Everything here runs during distillation only; hooks are set for one forward pass and removed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from hisparse.errors import ModelError, UnsupportedError

Label = Literal["key_distinctiveness", "received_attention", "received_attention_mean"]
LABELS: tuple[str, ...] = get_args(Label)
_REDUCED = Callable[[nn.Module, tuple[Any, ...], Any], Any]


def tail_margin(label: str, gap: int) -> int:
    """Tokens at the end of a window that get no label: those with fewer than `gap` queries beyond the gap."""
    return 0 if label == "key_distinctiveness" else 2 * gap


def label_window(model: PreTrainedModel, ids: Tensor, label: str, gap: int) -> Tensor:
    """Label float32 [T] of one window of token ids [T]; larger is more important.

    - ``key_distinctiveness``: 1 - cosine of a token's key before RoPE (after the key norm, where there is one) to the
      mean of the window's unit keys, averaged over full-attention layers and KV heads. The measure of KeyDiff (Park et
      al. 2025), taken before RoPE so that position does not enter.
    - ``received_attention``: ln of the largest attention weight that a token receives from a query at least `gap`
      tokens later, averaged over layers and heads before the logarithm. Nearer queries do not count, since the cache
      keeps the newest tokens anyway. ``received_attention_mean`` takes the mean over those queries (the accumulated
      score of H2O, Zhang et al. 2023).
      Both decay with position: see :func:`remove_position_decay`. The last :func:`tail_margin` labels are NaN.

    Raises ModelError where the architecture has no such keys or weights.
    """
    if label == "key_distinctiveness":
        return _key_distinctiveness(model, ids)
    return _received_attention(model, ids, gap, mean=label == "received_attention_mean")


def layer0_values(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Value rows float32 [T, F] that layer 0 hands to a cache for token ids [T]; no later layer is computed."""
    tap = _ValueTap()
    layers = model.config.get_text_config().num_hidden_layers
    cache = Cache(layers=[tap] + [DynamicLayer() for _ in range(layers - 1)])
    try:
        with torch.no_grad():
            _decoder(model)(ids.unsqueeze(0), past_key_values=cache, use_cache=True)
    except _Tapped as tapped:
        values = tapped.values[0].transpose(0, 1)  # [T, heads, D]
        return values.reshape(values.shape[0], -1).float()
    raise ModelError(f"{type(model).__name__}: layer 0 hands no values to the cache; it is not an attention layer")


def remove_position_decay(labels: Tensor, reference: Tensor, width: int = 65) -> Tensor:
    """labels [W, T] minus the mean over the windows of reference [R, T] at the same position, smoothed over `width`.

    Earlier tokens are seen by more queries; what a position receives on average says nothing about the token in it.
    NaN stands for "no label" and stays.
    """
    known = ~reference.isnan()
    total = reference.nan_to_num(0).sum(0)
    count = known.sum(0).to(total.dtype)
    kernel = total.new_ones(1, 1, width)

    def smooth(row: Tensor) -> Tensor:
        return nn.functional.conv1d(row.view(1, 1, -1), kernel, padding=width // 2).view(-1)

    return labels - smooth(total) / smooth(count).clamp_min(1e-9)


class _Tapped(Exception):  # noqa: N818 - a way out of the forward pass, not an error
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values


class _ValueTap(DynamicLayer):  # type: ignore[misc]
    """Layer 0's cache layer: leaves the forward pass with the values as soon as they arrive."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise _Tapped(value_states.detach())


def _decoder(model: PreTrainedModel) -> nn.Module:
    """The stack of decoder layers, without the head (whose logits nobody needs here)."""
    decoder: nn.Module | None = model.get_decoder()
    base: nn.Module = model.base_model
    return base if decoder is None else decoder


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The full-attention modules, in layer order. Raises ModelError unless each layer shows exactly one."""
    config = model.config.get_text_config()
    found: dict[int, nn.Module] = {}
    for module in _decoder(model).modules():
        position = getattr(module, "layer_idx", None)
        if isinstance(position, int) and isinstance(getattr(module, "k_proj", None), nn.Module):
            found[position] = module
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"] or list(range(len(kinds)))
    missing = [index for index in full if index not in found]
    if missing:
        raise ModelError(
            f"{type(model).__name__}: no attention module with a key projection `k_proj` in layer {missing[0]} (and "
            f"{len(missing) - 1} more); distillation reads keys there and does not know this architecture"
        )
    return [found[index] for index in full]


@contextmanager
def _hooked(modules: list[nn.Module], hook: _REDUCED) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _key_distinctiveness(model: PreTrainedModel, ids: Tensor) -> Tensor:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    tokens = ids.shape[0]
    if tokens == heads:
        raise UnsupportedError(
            f"a window of {tokens} tokens cannot be told from {heads} KV heads; choose another length"
        )
    total = torch.zeros(tokens)
    seen = 0

    def reduce(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        nonlocal seen
        keys = output[0].float()
        if keys.ndim == 2:  # projection, or a norm over all heads: [T, heads * D]
            keys = keys.view(tokens, heads, -1)
        elif keys.shape[0] == heads:  # a norm that runs after the heads were moved forward: [heads, T, D]
            keys = keys.transpose(0, 1)
        if keys.shape[:2] != (tokens, heads):
            raise ModelError(
                f"{type(model).__name__}: keys of shape {tuple(output.shape)}, expected {tokens} tokens x {heads} "
                "heads; distillation does not know this architecture"
            )
        unit = nn.functional.normalize(keys, dim=-1)
        cosine = nn.functional.cosine_similarity(unit, unit.mean(0, keepdim=True), dim=-1)
        total.add_((1 - cosine).mean(1).cpu())
        seen += 1

    sources = [
        norm if isinstance(norm := getattr(module, "k_norm", None), nn.Module) else module.get_submodule("k_proj")
        for module in attention_modules(model)
    ]
    with _hooked(sources, reduce), torch.no_grad():
        _decoder(model)(ids.unsqueeze(0), use_cache=False)
    if seen != len(sources):
        raise ModelError(f"{type(model).__name__}: {seen} of {len(sources)} layers computed keys; some share them")
    return total / seen


def _received_attention(model: PreTrainedModel, ids: Tensor, gap: int, mean: bool) -> Tensor:
    tokens = ids.shape[0]
    labelled = tokens - tail_margin("received_attention", gap)
    total = torch.zeros(tokens)
    seen = 0
    positions = torch.arange(tokens, device=ids.device)
    later = positions.unsqueeze(1) >= positions + gap  # [query, key]

    def reduce(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        nonlocal seen
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, Tensor) or weights.shape[-2:] != (tokens, tokens):
            raise ModelError(
                f"{type(model).__name__}: its attention gives no weights; use the label key_distinctiveness"
            )
        weights = weights[0].float().masked_fill(~later, 0)  # [heads, query, key]
        received = weights.sum(1) / later.sum(0).clamp_min(1) if mean else weights.amax(1)
        total.add_(received.mean(0).cpu())
        seen += 1
        return (output[0], None, *output[2:])  # the weights of all layers at once would be gigabytes

    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with _hooked(attention_modules(model), reduce), torch.no_grad():
            _decoder(model)(ids.unsqueeze(0), use_cache=False)
    finally:
        model.set_attn_implementation(implementation)
    if not seen:
        raise ModelError(f"{type(model).__name__}: no attention layer ran; use the label key_distinctiveness")
    label = (total / seen).clamp_min(1e-12).log()
    label[labelled:] = torch.nan
    return label
