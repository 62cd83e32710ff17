"""Training the TLIF network on labelled tokens, and scoring it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hisparse.tlif.network import Tlif

TOP = 0.1  # the share of a window's tokens that counts as important
_BATCH = 512
_RATE = 4e-3
_DECAY = 0.05
_CONSTANT = 1e-6  # deviation below which an input counts as constant
_DROPOUT = 0.2  # of the inputs: rows of rare tokens would else be learned by heart


@dataclass(frozen=True)
class Examples:
    """Tokens of labelled windows.

    inputs [N, 2 * features + statistics] float32; targets [N] float32: 1 for the top tenth of the token's window, else
    0; graded [N] float32 in (0, 1): how far above or below that border the label lies.
    """

    inputs: Tensor
    targets: Tensor
    graded: Tensor

    @classmethod
    def of_window(cls, inputs: Tensor, labels: Tensor) -> Examples:
        """Examples of one window; tokens whose label is NaN are left out."""
        known = ~labels.isnan()
        inputs, labels = inputs[known], labels[known]
        border, high, low = labels.quantile(torch.tensor([1 - TOP, 1 - TOP / 2, 1 - 1.5 * TOP]))
        graded = torch.sigmoid(2 * (labels - border) / (high - low).clamp_min(1e-9))
        return cls(inputs, (labels >= border).float(), graded)

    @classmethod
    def join(cls, parts: list[Examples]) -> Examples:
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "targets", "graded")))

    def __len__(self) -> int:
        return self.targets.shape[0]


def train(
    examples: Examples, validation: Examples, features: int, epochs: int, seed: int, report: Callable[[int, int], None]
) -> Tlif:
    """A network fitted to `examples`, calibrated on `validation`, inputs unscaled.

    Trained on the graded target, which tells near misses from the rest and so ranks better on little data than the
    hard one; calibrated on the hard one, so that the output estimates the probability of the top tenth.
    `report(step, steps)` follows the progress. The global random state stays as it is; equal arguments on one machine
    give equal networks.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # Linear draws from the global generator, for naught
        network = Tlif(features)
    for layer in (network.first, network.second):
        bound = 1 / math.sqrt(layer.in_features)
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
    mean = examples.inputs.mean(0)
    scale = examples.inputs.std(0)
    scale[scale < _CONSTANT] = math.inf  # a constant input says nothing, and must not once it varies: weight 0
    inputs = (examples.inputs - mean) / scale
    steps = epochs * math.ceil(len(examples) / _BATCH)
    optimiser = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=steps + 1)
    step = 0
    for _ in range(epochs):
        order = torch.randperm(len(examples), generator=generator)
        for batch in torch.split(order, _BATCH):
            rows = inputs[batch]
            kept = torch.rand(rows.shape, generator=generator) >= _DROPOUT
            logits = network(rows * kept / (1 - _DROPOUT))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, examples.graded[batch])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            step += 1
            report(step, steps)
    network.fold_input_scaling(mean, scale)
    with torch.no_grad():
        network.fold_calibration(*platt(network(validation.inputs), validation.targets))
    return network.requires_grad_(False)


def platt(logits: Tensor, targets: Tensor, steps: int = 50) -> tuple[float, float]:
    """Slope and offset for which sigmoid(slope * logit + offset) is calibrated on targets [N] (Platt 1999), by Newton.

    The slope stays positive, so that calibration never turns the ranking round.
    """
    x, y = logits.double(), targets.double()
    design = torch.stack((x, torch.ones_like(x)), dim=1)
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
    ridge = 1e-6 * len(x) * torch.eye(2, dtype=torch.float64)
    for _ in range(steps):
        p = torch.sigmoid(design @ weights)
        gradient = design.T @ (y - p) - ridge @ (weights - torch.tensor([1.0, 0.0], dtype=torch.float64))
        hessian = (design * (p * (1 - p)).unsqueeze(1)).T @ design + ridge
        move = torch.linalg.solve(hessian, gradient)
        weights = weights + move / max(1.0, float(move.norm()))
        if float(move.norm()) < 1e-10:
            break
    return max(float(weights[0]), 1e-3), float(weights[1])


def auc(scores: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve: the chance that a random positive outranks a random negative, ties counting half.

    scores [N] float, targets [N] 0 or 1; NaN where one of the classes is empty.
    """
    positives = targets > 0.5
    count = int(positives.sum())
    if count in (0, len(targets)):
        return math.nan
    _, inverse, ties = torch.unique(scores, return_inverse=True, return_counts=True)
    last = ties.cumsum(0).double()  # the mean rank of a group of equal scores
    ranks = (last - (ties.double() - 1) / 2)[inverse]
    total = float(ranks[positives].sum())
    return (total - count * (count + 1) / 2) / (count * (len(targets) - count))


def score(
    network: Tlif, examples: Mapping[str, Examples], thresholds: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Per named set: tokens, AUC against the top tenth, mean importance, share that passes each threshold."""
    scores = {}
    for name, part in examples.items():
        with torch.no_grad():
            importance = network(part.inputs).sigmoid()
        scores[name] = {
            "tokens": float(len(part)),
            "auc": round(auc(importance, part.targets), 4),
            "mean_importance": round(float(importance.mean()), 4),
            **{f"share_{key}": round(float((importance >= at).float().mean()), 4) for key, at in thresholds.items()},
        }
    return scores
