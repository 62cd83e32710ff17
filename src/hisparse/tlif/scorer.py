"""Scorers: from a sequence's value rows to the importance of its tokens, chunk by chunk.

A scorer sees the rows of layer 0's value vectors, in order, in pieces of any size; a :class:`ScorerState` carries what
the next piece needs. Importance estimates the probability that a token belongs to the most important tenth of its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from hisparse.errors import ModelError
from hisparse.tlif.network import Tlif
from hisparse.tlif.statistics import STATISTICS, previous_rows, window_statistics

if TYPE_CHECKING:
    from hisparse.tlif.fused import FusedWeights

_SLICE = 1 << 15  # tokens scored at a time: bounds the work space on prompts of a million tokens
_TENTH = 9  # u ** 9 of a uniform u has mean 1/10: a score without training, calibrated in the mean
_MARGIN = 1e-6  # importance stays inside (0, 1)
_MEAN_DISTANCE = STATISTICS.index("mean_distance")


@dataclass
class ScorerState:
    """What one sequence's scorer remembers between pieces; never changed in place.

    recent [R <= prefix, F]: the last value rows, in the dtype in which they came. trail [R] float32: the last distances
    (novelty scorer only). seen: tokens scored so far.
    """

    recent: Tensor
    seen: int = 0
    trail: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        return self.recent.nbytes + (0 if self.trail is None else self.trail.nbytes)


@runtime_checkable
class Scorer(Protocol):
    """Importance of the next tokens of one sequence."""

    name: str

    def score(self, values: Tensor, state: ScorerState | None) -> tuple[Tensor, ScorerState]:
        """Importance float32 [T] in (0, 1) of values [T, F] (any float dtype, any device), and the state after them.

        `state` is None for the first piece. Scoring in pieces gives what scoring at once gives, within rounding (1e-5).
        The given state stays valid: a piece may be scored again from it. Raises ModelError for rows of a wrong width.
        """
        ...


def _no_rows(values: Tensor) -> Tensor:
    """An empty tensor of the width of values [T, F]; a slice of `values` would keep all of it alive."""
    return values.new_empty((0, *values.shape[1:]))


def _advance(values: Tensor, recent: Tensor, prefix: int) -> Tensor:
    """The last `prefix` rows of recent [R, F] followed by values [T, F], without a hold on a longer tensor."""
    if values.shape[0] >= prefix:
        return values[-prefix:].detach().clone()
    return torch.cat((recent, values.detach()))[-prefix:].clone()


def _check(values: Tensor, features: int, name: str) -> None:
    if values.ndim != 2 or values.shape[1] != features:
        raise ModelError(
            f"{name}: value rows of shape {tuple(values.shape)}, expected [tokens, {features}] (KV heads x head_dim of "
            "layer 0); the scorer and the cache belong to different models"
        )


class TlifScorer:
    """A distilled network. Its windows have the length it was distilled with, whatever the configuration says."""

    def __init__(self, network: Tlif, prefix_length: int, name: str = "tlif") -> None:
        self.name = name
        self.prefix_length = prefix_length
        self.features = network.features
        parameters = (network.first.weight, network.first.bias, network.second.weight, network.second.bias)
        self._weights = {
            torch.device("cpu"): tuple(p.detach().to("cpu", torch.float32).contiguous() for p in parameters)
        }
        self._kernel: dict[torch.device, FusedWeights] = {}

    def _fused(self, values: Tensor) -> FusedWeights | None:
        """The weights as the GPU's kernel reads them, where it serves rows like `values`."""
        device = values.device
        if device.type != "cuda" or find_spec("triton") is None:
            return None
        from hisparse.tlif.fused import FusedWeights, serves

        if not serves(values, self.prefix_length):
            return None
        if device not in self._kernel:
            self._kernel[device] = FusedWeights(*self._on(device))
        return self._kernel[device]

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._weights:
            self._weights[device] = tuple(weight.to(device) for weight in self._weights[torch.device("cpu")])
        return self._weights[device]

    @torch.no_grad()
    def score(self, values: Tensor, state: ScorerState | None) -> tuple[Tensor, ScorerState]:
        _check(values, self.features, self.name)
        state = state or ScorerState(_no_rows(values))
        kernel = self._fused(values)
        if kernel is not None and state.recent.dtype == values.dtype:
            importance = kernel.importance(values, state.recent, self.prefix_length)
            recent = _advance(values, state.recent, self.prefix_length)
            return importance, ScorerState(recent, state.seen + values.shape[0])
        first, first_bias, second, second_bias = self._on(values.device)
        recent, parts, width = state.recent, [], self.features
        for piece in torch.split(values, _SLICE):
            rows, past = piece.float(), recent.float()
            statistics = window_statistics(rows, past, self.prefix_length)
            hidden = torch.addmm(first_bias, rows, first[:, :width].T)
            hidden.addmm_(previous_rows(rows, past), first[:, width : 2 * width].T)
            hidden.addmm_(statistics, first[:, 2 * width :].T)
            logits = torch.nn.functional.linear(torch.nn.functional.gelu(hidden), second, second_bias)
            parts.append(logits.squeeze(1).sigmoid_().clamp_(_MARGIN, 1 - _MARGIN))
            recent = _advance(piece, recent, self.prefix_length)
        importance = torch.cat(parts) if len(parts) > 1 else parts[0]
        return importance, ScorerState(recent, state.seen + values.shape[0])


class NoveltyScorer:
    """No training: how far a value row lies from the mean of the `prefix_length` rows before it.

    The distance is put on the scale of its own recent past: z against mean and deviation of the last distances, then
    Phi(z) ** 9, which is near uniform rank to the ninth and so averages about one tenth.
    """

    name = "novelty"

    def __init__(self, prefix_length: int = 128) -> None:
        self.prefix_length = prefix_length

    @torch.no_grad()
    def score(self, values: Tensor, state: ScorerState | None) -> tuple[Tensor, ScorerState]:
        state = state or ScorerState(_no_rows(values), trail=values.new_zeros(0, dtype=torch.float32))
        _check(values, state.recent.shape[1], self.name)
        recent, trail, parts = state.recent, state.trail, []
        if trail is None:
            raise ModelError("novelty: the state was made by another scorer; start a sequence with state = None")
        for piece in torch.split(values, _SLICE):
            distances = window_statistics(piece.float(), recent.float(), self.prefix_length)[:, _MEAN_DISTANCE]
            parts.append(self._rank(distances, trail))
            recent = _advance(piece, recent, self.prefix_length)
            trail = torch.cat((trail, distances))[-self.prefix_length :].clone()
        importance = torch.cat(parts) if len(parts) > 1 else parts[0]
        return importance, ScorerState(recent, state.seen + values.shape[0], trail)

    def _rank(self, distances: Tensor, trail: Tensor) -> Tensor:
        """Importance float32 [T] of distances [T] that follow the distances trail [R <= prefix]."""
        if not distances.shape[0]:
            return distances
        front = self.prefix_length - trail.shape[0]
        padded = torch.nn.functional.pad(torch.cat((trail, distances)), (front, 0))[:-1]
        real = torch.nn.functional.pad(padded.new_ones(trail.shape[0] + distances.shape[0]), (front, 0))[:-1]
        windows, mask = padded.unfold(0, self.prefix_length, 1), real.unfold(0, self.prefix_length, 1)
        count = mask.sum(1).clamp_min(1)
        mean = windows.sum(1) / count
        deviation = (((windows - mean.unsqueeze(1)) * mask).square().sum(1) / count).sqrt()
        z = (distances - mean) / deviation.clamp_min(1e-3)
        z = torch.where(mask.sum(1) > 1, z, torch.zeros_like(z))  # one distance has no deviation
        importance: Tensor = torch.special.ndtr(z).pow(_TENTH).clamp(_MARGIN, 1 - _MARGIN)
        return importance


class RandomScorer:
    """A seeded hash of the position: the control that any other scorer has to beat."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @torch.no_grad()
    def score(self, values: Tensor, state: ScorerState | None) -> tuple[Tensor, ScorerState]:
        state = state or ScorerState(_no_rows(values))
        _check(values, state.recent.shape[1], self.name)
        positions = torch.arange(state.seen, state.seen + values.shape[0], device=values.device)
        importance = _hash(positions, self.seed).pow(_TENTH).clamp(_MARGIN, 1 - _MARGIN)
        return importance, ScorerState(state.recent, state.seen + values.shape[0])


def _hash(positions: Tensor, seed: int) -> Tensor:
    """Uniform float32 [T] in [0, 1): the splitmix64 finaliser (Steele, Lea and Flood 2014) of position and seed."""
    state = (positions + 1 + (seed << 32)) * -0x61C8864680B583EB  # the golden-ratio increment, as a signed number
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    state = state ^ ((state >> 31) & ((1 << 33) - 1))
    return ((state >> 40) & 0xFFFFFF).float() / (1 << 24)
