"""TLIF files (safetensors, with metadata) and the choice of a scorer."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hisparse.config import TlifConfig
from hisparse.errors import ConfigError, InputError, ModelError
from hisparse.identity import ModelIdentity
from hisparse.tlif.network import PARAMETER_LIMIT, Tlif, inputs_of
from hisparse.tlif.scorer import NoveltyScorer, RandomScorer, Scorer, TlifScorer
from hisparse.tlif.statistics import STATISTICS

FORMAT = "hisparse-tlif"
VERSION = 1
SUFFIX = ".tlif.safetensors"


@dataclass(frozen=True)
class TlifCard:
    """What a TLIF file says about itself: the model, the label, how it was made and how it scored."""

    model: ModelIdentity
    label: str
    prefix_length: int
    command: str
    scores: Mapping[str, Any] = field(default_factory=dict)

    def to_metadata(self, network: Tlif) -> dict[str, str]:
        return {
            "format": FORMAT,
            "version": str(VERSION),
            "label": self.label,
            "prefix_length": str(self.prefix_length),
            "features": str(network.features),
            "statistics": json.dumps(STATISTICS),
            "hidden": str(network.first.out_features),
            "parameters": str(network.parameters_learned),
            "command": self.command,
            "scores": json.dumps(self.scores),
            **self.model.to_metadata(),
        }


def save_tlif(network: Tlif, card: TlifCard, path: Path) -> None:
    """Write `network` (float32) and `card` to `path`: whole or not at all, and the same bytes for the same content.

    Raises InputError where the file cannot be written.
    """
    part = path.with_name(path.name + ".tmp")
    tensors = {
        name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in network.state_dict().items()
    }
    try:
        part.write_bytes(_ordered(save(tensors, metadata=card.to_metadata(network))))
        part.replace(path)
    except OSError as error:
        raise InputError(f"TLIF {path}: cannot be written ({error.strerror}); choose another --output") from None


def _ordered(data: bytes) -> bytes:
    """A safetensors file with its header in order: the library writes metadata in an order of chance."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the data that follow stay 8-byte aligned
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise ModelError(f"TLIF {path}: no such file; `hisparse distill` makes one")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"TLIF {path}: damaged or cut short ({error}); distil or download it again") from None
    return metadata, tensors


def _card(metadata: dict[str, str], path: Path) -> TlifCard:
    if metadata.get("format") != FORMAT:
        raise ModelError(
            f"TLIF {path}: format {metadata.get('format')!r}, expected {FORMAT!r}, as `hisparse distill` writes it"
        )
    if metadata.get("version") != str(VERSION):
        raise ModelError(
            f"TLIF {path}: version {metadata.get('version')!r}, this HiSparse reads {VERSION}; distil it again"
        )
    try:
        statistics = json.loads(metadata["statistics"])
        card = TlifCard(
            model=ModelIdentity.from_metadata(metadata),
            label=metadata["label"],
            prefix_length=int(metadata["prefix_length"]),
            command=metadata["command"],
            scores=json.loads(metadata["scores"]),
        )
    except (KeyError, ValueError, ModelError) as error:
        raise ModelError(f"TLIF {path}: unreadable metadata ({error}); distil it again") from None
    if statistics != list(STATISTICS) or card.prefix_length < 1:
        raise ModelError(
            f"TLIF {path}: made for statistics {statistics} over {card.prefix_length} tokens, this HiSparse computes "
            f"{list(STATISTICS)}; distil it again"
        )
    return card


def read_card(path: str | Path) -> TlifCard:
    """The card of a TLIF file; ModelError where the file is missing, damaged or of another format."""
    path = Path(path)
    return _card(_read(path)[0], path)


def load_tlif(path: str | Path, identity: ModelIdentity | None, config: TlifConfig | None = None) -> TlifScorer:
    """Scorer from a TLIF file.

    `identity` is the loaded model's; None skips the check. The windows have the length the network was distilled with:
    `config.prefix_length` sets the dense tail, not them. Raises ModelError for a file that is missing, damaged, of
    another format or of another model.
    """
    path = Path(path)
    metadata, tensors = _read(path)
    card = _card(metadata, path)
    if identity is not None:
        card.model.check(identity, f"TLIF {path}")
    features = card.model.value_features
    expected = set(Tlif(1, 1).state_dict())
    if set(tensors) != expected:
        raise ModelError(f"TLIF {path}: holds tensors {sorted(tensors)}, expected {sorted(expected)}; distil it again")
    hidden = tensors["first.bias"].numel()
    if not 0 < hidden * (inputs_of(features) + 2) + 1 < PARAMETER_LIMIT:
        raise ModelError(
            f"TLIF {path}: hidden width {hidden} breaks the limit of {PARAMETER_LIMIT} parameters; distil it again"
        )
    network = Tlif(features, hidden)
    for name, parameter in network.state_dict().items():
        tensor = tensors[name]
        if tensor.shape != parameter.shape or tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise ModelError(
                f"TLIF {path}: tensor {name} is {tensor.dtype} {tuple(tensor.shape)} or not finite, expected float32 "
                f"{tuple(parameter.shape)}; distil it again"
            )
    network.load_state_dict(tensors)
    return TlifScorer(network, card.prefix_length, f"tlif:{path.name}")


def shipped_tlifs() -> list[Path]:
    """The TLIF files that come with the package."""
    folder = Path(str(resources.files("hisparse"))) / "data"
    return sorted(folder.glob(f"*{SUFFIX}"))


def scorer_for(model_identity: ModelIdentity, config: TlifConfig, path: Path | None = None) -> Scorer:
    """The scorer that `config` asks for: `path` if given, else a shipped TLIF of the same model.

    A model for which no TLIF is found gets the novelty scorer, and a warning that says so. Raises ModelError where
    `path` is of another model or damaged, ConfigError where a path is given but `config.scorer` is not "tlif".
    """
    if config.scorer != "tlif":
        if path is not None:
            raise ConfigError(
                f'tlif.scorer = "{config.scorer}" reads no file, but {path} is given; use "tlif" or drop the file'
            )
        return NoveltyScorer(config.prefix_length) if config.scorer == "novelty" else RandomScorer()
    if path is not None:
        return load_tlif(path, model_identity, config)
    for shipped in shipped_tlifs():
        if read_card(shipped).model.matches(model_identity):
            return load_tlif(shipped, model_identity, config)
    warnings.warn(
        f"no TLIF for this model ({model_identity.model_type}, hidden size {model_identity.hidden_size}, "
        f"{model_identity.layers} layers): token importance falls back to novelty, which needs no training and finds "
        "less. Make one with `hisparse distill --model MODEL --corpus FILES -o tlif.safetensors` and pass that file",
        stacklevel=2,
    )
    return NoveltyScorer(config.prefix_length)
