"""Self-distillation: label tokens with the frozen model, then train TLIF on the labels.

Labelling takes nearly all the time, so its results are kept in a checkpoint beside the output; an interrupted run goes
on where it stopped. Training takes seconds and starts afresh.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from hisparse.config import TlifConfig
from hisparse.errors import InputError
from hisparse.identity import ModelIdentity
from hisparse.tlif.corpus import Window, draw_windows, file_hash
from hisparse.tlif.labels import LABELS, label_window, layer0_values, remove_position_decay, tail_margin
from hisparse.tlif.network import Tlif
from hisparse.tlif.statistics import network_inputs
from hisparse.tlif.store import TlifCard, save_tlif
from hisparse.tlif.training import Examples, score, train

THRESHOLDS = {"128K": TlifConfig().threshold(131072), "7.5K": TlifConfig().threshold(7500)}
_PARTS = 8  # of eight windows one calibrates, and one is held out where no held-out files are given
_SAVE_EVERY = 10.0  # seconds between checkpoints
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DistillPlan:
    """What decides the result, but for the model. `tokens` counts labelled training tokens (calibration included)."""

    corpus: tuple[Path, ...]
    held_out: tuple[Path, ...] = ()
    label: str = "key_distinctiveness"
    tokens: int = 200_000
    chunk: int = 1024
    epochs: int = 6
    seed: int = 0
    prefix_length: int = 128

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise InputError(f"label {self.label!r} is unknown; known labels: {', '.join(LABELS)}")
        if not self.corpus:
            raise InputError("no corpus file is given; name at least one plain text file with --corpus")
        for name in ("tokens", "epochs", "prefix_length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}; at least 1 is needed")
        least = self.prefix_length + tail_margin(self.label, self.prefix_length) + 64
        if self.chunk < least:
            better = ", better 1024" if least < 1024 else ""
            raise InputError(
                f"chunk = {self.chunk} leaves too few tokens to label beside the margins of the label {self.label} and "
                f"prefix_length = {self.prefix_length}; use a chunk of at least {least}{better}, or a shorter prefix"
            )

    @property
    def labelled_per_window(self) -> int:
        return self.chunk - self.prefix_length - tail_margin(self.label, self.prefix_length)

    @property
    def windows(self) -> int:
        return max(math.ceil(self.tokens / self.labelled_per_window), _PARTS)

    @property
    def held_out_windows(self) -> int:
        return max(self.windows // 4, 2 * len(self.held_out)) if self.held_out else 0

    def fingerprint(self, identity: ModelIdentity, dtype: torch.dtype) -> str:
        """Hash of everything that the labels depend on; epochs are not among it. dtype: of the model."""
        key = {
            "dtype": str(dtype),
            **identity.to_metadata(),
            "corpus": [file_hash(path) for path in self.corpus],
            "held_out": [file_hash(path) for path in self.held_out],
            **{name: getattr(self, name) for name in ("label", "tokens", "chunk", "seed", "prefix_length")},
        }
        return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def checkpoint_path(output: Path) -> Path:
    """Where the labels of an unfinished run are kept."""
    return output.with_name(output.name + ".partial")


def distill(
    model: PreTrainedModel,
    tokenizer: Any,
    plan: DistillPlan,
    output: Path,
    command: str,
    report: Report = lambda stage, done, of: None,
    restart: bool = False,
) -> TlifCard:
    """Write a TLIF for `model` to `output`, return its card; `report(stage, done, total)` follows the progress.

    Deterministic on one machine for equal arguments, interrupted or not. Raises InputError for a corpus that cannot be
    used or a checkpoint of other arguments (`restart` discards it), ModelError for an architecture without labels.
    """
    identity = ModelIdentity.of(model)
    checkpoint = _Checkpoint(checkpoint_path(output), plan.fingerprint(identity, model.dtype), restart)
    windows = draw_windows(tokenizer, list(plan.corpus), plan.windows, plan.chunk, plan.seed)
    if len(windows) < _PARTS:
        raise InputError(
            f"corpus: only {len(windows)} windows of {plan.chunk} tokens, {_PARTS} are needed; give longer texts or a "
            "smaller --chunk"
        )
    corpus = len(windows)
    if plan.held_out:
        windows += draw_windows(tokenizer, list(plan.held_out), plan.held_out_windows, plan.chunk, plan.seed)
    labels = _label_all(model, windows, plan, checkpoint, report)
    examples = _examples(model, windows, labels, corpus, plan, report)
    training, validation, held_out = _split(windows, examples, corpus, plan.seed)
    network = train(
        Examples.join(training),
        Examples.join(validation),
        identity.value_features,
        plan.epochs,
        plan.seed,
        lambda done, of: report("training", done, of),
    )
    card = TlifCard(identity, plan.label, plan.prefix_length, command, _scores(network, training, held_out))
    save_tlif(network, card, output)
    checkpoint.remove()
    return card


def _split(
    windows: list[Window], examples: list[Examples], corpus: int, seed: int
) -> tuple[list[Examples], list[Examples], dict[str, list[Examples]]]:
    """Training, validation and held-out windows (the last by file)."""
    order = torch.randperm(corpus, generator=torch.Generator().manual_seed(seed)).tolist()
    part = corpus // _PARTS
    cut = 2 * part if corpus == len(windows) else part
    tests = list(range(corpus, len(windows))) or order[part:cut]
    held_out: dict[str, list[Examples]] = {}
    for index in sorted(tests):
        held_out.setdefault(windows[index].source, []).append(examples[index])
    return [examples[index] for index in order[cut:]], [examples[index] for index in order[:part]], held_out


def _scores(network: Tlif, training: list[Examples], held_out: dict[str, list[Examples]]) -> dict[str, Any]:
    sets = {name: Examples.join(parts) for name, parts in held_out.items()}
    sets["all"] = Examples.join([part for parts in held_out.values() for part in parts])
    return {
        "held_out": score(network, sets, THRESHOLDS),
        "training": score(network, {"all": Examples.join(training)}, THRESHOLDS)["all"],
        "thresholds": {name: round(value, 4) for name, value in THRESHOLDS.items()},
    }


def _label_all(
    model: PreTrainedModel, windows: list[Window], plan: DistillPlan, checkpoint: _Checkpoint, report: Report
) -> Tensor:
    """Labels float32 [windows, chunk], NaN where there is none; from the checkpoint as far as it goes."""
    labels = checkpoint.load(len(windows), plan.chunk)
    done = int((~labels.isnan()).any(1).sum())
    report("labels", done, len(windows))
    saved = time.monotonic()
    try:
        for index in range(done, len(windows)):
            row = label_window(model, windows[index].ids.to(model.device), plan.label, plan.prefix_length)
            row[: plan.prefix_length] = torch.nan  # their statistics would lack a full window
            labels[index] = row
            report("labels", index + 1, len(windows))
            if time.monotonic() - saved > _SAVE_EVERY:
                checkpoint.save(labels)
                saved = time.monotonic()
    finally:  # an interruption, an error of the last window: what is labelled stays labelled
        checkpoint.save(labels)
    return labels


def _examples(
    model: PreTrainedModel, windows: list[Window], labels: Tensor, corpus: int, plan: DistillPlan, report: Report
) -> list[Examples]:
    if plan.label != "key_distinctiveness":
        labels = remove_position_decay(labels, labels[:corpus])
    examples = []
    for index, window in enumerate(windows):
        values = layer0_values(model, window.ids.to(model.device)).cpu()
        inputs = network_inputs(values, values[:0], plan.prefix_length)
        examples.append(Examples.of_window(inputs, labels[index]))
        report("inputs", index + 1, len(windows))
    return examples


class _Checkpoint:
    """Labels of an unfinished run, valid for one fingerprint."""

    def __init__(self, path: Path, fingerprint: str, restart: bool) -> None:
        self.path, self.fingerprint = path, fingerprint
        if restart:
            path.unlink(missing_ok=True)

    def load(self, windows: int, chunk: int) -> Tensor:
        """[windows, chunk], NaN where nothing is known. Raises InputError for another run's or a damaged file."""
        if not self.path.exists():
            return torch.full((windows, chunk), torch.nan)
        remedy = f"run with --restart to discard it, or delete {self.path.name}"
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                labels: Tensor = file.get_tensor("labels")
        except (SafetensorError, OSError) as error:
            raise InputError(f"checkpoint {self.path}: damaged ({error}); {remedy}") from None
        if metadata.get("fingerprint") != self.fingerprint or labels.shape != (windows, chunk):
            raise InputError(
                f"checkpoint {self.path}: of a run with another model, dtype, corpus, label, seed or size; {remedy}, "
                "or finish that run with its own arguments"
            )
        return labels

    def save(self, labels: Tensor) -> None:
        part = self.path.with_name(self.path.name + ".tmp")
        part.write_bytes(save({"labels": labels}, metadata={"fingerprint": self.fingerprint}))
        part.replace(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
