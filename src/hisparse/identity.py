"""Which model a companion file (TLIF, calibration) belongs to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hisparse.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLES = 256
SAME_MODEL = 0.9
_COLUMN_STEP = 97  # prime, so that the sample walks over all columns whatever the width


@dataclass(frozen=True)
class ModelIdentity:
    """Dimensions of a model and a sample of its input embedding.

    The sample is compared by cosine, so one file serves every copy of a model: other dtypes, quantised weights, light
    fine-tunes. Models of one family that merely share their dimensions have unrelated embeddings and differ.
    """

    model_type: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    sample: tuple[float, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelIdentity:
        """Identity of a loaded model; a multimodal one is known by its text part.

        Raises ModelError where the configuration has no attention dimensions or the embedding holds no values.
        """
        config = model.config.get_text_config()
        try:
            hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        except AttributeError as error:
            raise ModelError(
                f"{type(model).__name__}: its configuration lacks {error.name!r}; HiSparse works on decoder models "
                "with ordinary (grouped-query) attention"
            ) from None
        weight = model.get_input_embeddings().weight
        if weight.device.type == "meta":
            raise ModelError(
                f"{type(model).__name__}: the input embedding is on the meta device; load the weights first"
            )
        return cls(
            model_type=str(config.model_type),
            hidden_size=int(hidden),
            layers=int(layers),
            heads=int(heads),
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
            vocab_size=int(weight.shape[0]),
            sample=embedding_sample(weight.detach()),
        )

    @property
    def value_features(self) -> int:
        """Width of a token's value row: KV heads x head_dim."""
        return self.kv_heads * self.head_dim

    def to_metadata(self) -> dict[str, str]:
        """Strings for a safetensors header; :meth:`from_metadata` reads them back to an equal identity."""
        fields = {name: getattr(self, name) for name in _DIMENSIONS}
        return {"model": json.dumps({**fields, "sample": list(self.sample)})}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> ModelIdentity:
        """Identity written by :meth:`to_metadata`; ModelError where it is missing or damaged."""
        try:
            data: dict[str, Any] = json.loads(metadata["model"])
            sample = tuple(float(value) for value in data["sample"])
            numbers = {name: int(data[name]) for name in _DIMENSIONS if name != "model_type"}
            identity = cls(model_type=str(data["model_type"]), sample=sample, **numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"metadata: no readable model identity ({error!r}); the file was not written by HiSparse, make it anew"
            ) from None
        if len(sample) != SAMPLES or not all(map(math.isfinite, sample)):
            raise ModelError(
                f"metadata: the embedding sample has {len(sample)} usable values, expected {SAMPLES}; make it anew"
            )
        return identity

    def similarity(self, other: ModelIdentity) -> float:
        """Cosine of the two embedding samples; two samples of zeros count as equal."""
        mine, theirs = math.hypot(*self.sample), math.hypot(*other.sample)
        if mine == 0 or theirs == 0:
            return float(mine == theirs)
        return math.fsum(a * b for a, b in zip(self.sample, other.sample, strict=True)) / (mine * theirs)

    def matches(self, other: ModelIdentity) -> bool:
        """Whether both describe the same model."""
        return not self._differences(other)

    def check(self, other: ModelIdentity, what: str) -> None:
        """Raise ModelError unless `other` (the loaded model) is the model of `self` (the file, described by `what`)."""
        differences = self._differences(other)
        if differences:
            raise ModelError(
                f"{what} belongs to another model: {'; '.join(differences)}. Make one for this model with "
                "`hisparse distill` or `hisparse calibrate`, or leave the option out"
            )

    def _differences(self, other: ModelIdentity) -> list[str]:
        found = [
            f"{name} {getattr(self, name)} in the file, {getattr(other, name)} in the model"
            for name in _DIMENSIONS
            if getattr(self, name) != getattr(other, name)
        ]
        if not found and (cosine := self.similarity(other)) < SAME_MODEL:
            found.append(
                f"same dimensions but other weights (cosine of the embeddings {cosine:.3f}, expected >= {SAME_MODEL})"
            )
        return found


_DIMENSIONS = ("model_type", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "vocab_size")


def embedding_sample(weight: torch.Tensor) -> tuple[float, ...]:
    """256 entries of the embedding [V, H] at fixed strides of rows and columns."""
    rows, columns = weight.shape
    steps = torch.arange(SAMPLES, device=weight.device)
    values = weight[steps * rows // SAMPLES, steps * _COLUMN_STEP % columns].to(torch.float32)
    # Six digits tell models apart and keep the header short.
    return tuple(float(f"{value:.6g}") for value in values.tolist())
