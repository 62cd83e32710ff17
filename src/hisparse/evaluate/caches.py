"""Caches under test behind one small interface, so that every measurement runs on all of them alike."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

if TYPE_CHECKING:
    from hisparse.config import HiSparseConfig


class CacheFactory(Protocol):
    """Makes caches of one kind for one model at a time.

    `new` puts the model on the attention implementation that the kind needs (and leaves it there), so a forward pass
    with a cache of another kind has to be preceded by that kind's `use`. `fork` gives an independent copy: what is
    appended to one is not seen by the other. `report` describes what a cache holds, in bytes; its keys are those of
    ``CacheReport.to_json``, at least `dense_bytes`, `gpu_bytes`, `host_bytes` and `capacity`.
    """

    name: str

    def use(self, model: Any) -> None: ...

    def new(self, model: Any) -> Any: ...

    def fork(self, cache: Any) -> Any: ...

    def report(self, cache: Any) -> dict[str, Any]: ...


def set_attention(model: Any, name: str) -> None:
    """Put `model` on an attention implementation unless it is on it already."""
    if model.config.get_text_config(decoder=True)._attn_implementation != name:
        model.set_attn_implementation(name)


class DenseCaches:
    """transformers' DynamicCache with stock scaled-dot-product attention: the baseline."""

    name = "dense"

    def use(self, model: Any) -> None:
        set_attention(model, "sdpa")

    def new(self, model: Any) -> Any:
        self.use(model)
        return DynamicCache(config=model.config)

    def fork(self, cache: Any) -> Any:
        return copy.deepcopy(cache)

    def report(self, cache: Any) -> dict[str, Any]:
        """`gpu_bytes` in the model's dtype as held; `dense_bytes` counts two bytes a value, as everywhere."""
        held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        values = sum(layer.keys.numel() + layer.values.numel() for layer in held)
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in held)
        capacity = 2 * values / nbytes if nbytes else 0.0
        return {"dense_bytes": 2 * values, "gpu_bytes": nbytes, "host_bytes": 0, "capacity": capacity}


class HiSparseCaches:
    """HiSparseCache in one configuration, with the companion files given or those that ship with the package."""

    def __init__(
        self,
        config: HiSparseConfig | None = None,
        name: str = "hisparse",
        tlif: Path | None = None,
        calibration: Path | None = None,
    ) -> None:
        self.config, self.name, self.tlif, self.calibration = config, name, tlif, calibration

    def use(self, model: Any) -> None:
        import hisparse.integrations.transformers  # noqa: F401 - registers the attention implementation

        set_attention(model, "hisparse")

    def new(self, model: Any) -> Any:
        from hisparse.integrations.transformers import HiSparseCache

        self.use(model)
        return HiSparseCache(model, self.config, tlif=self.tlif, calibration=self.calibration)

    def fork(self, cache: Any) -> Any:
        return copy.deepcopy(cache)

    def report(self, cache: Any) -> dict[str, Any]:
        data: dict[str, Any] = cache.report().to_json()
        return data


@torch.inference_mode()
def feed(model: Any, cache: Any, ids: Tensor, *, chunk: int | None = None, keep: int = 1) -> Tensor:
    """Append `ids` int64 [1, T] to `cache`; returns the logits of the last `keep` positions, [keep, V], model's dtype.

    With `chunk` the tokens are given in pieces of that many; `keep` must fit in the last piece.
    """
    logits: Tensor | None = None
    for piece in torch.split(ids, chunk or max(ids.shape[1], 1), dim=1):
        logits = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits[0]
    assert logits is not None
    return logits


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next is true."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
