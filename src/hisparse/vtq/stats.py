"""Per-channel statistics of K and V, and the order in which K's channels are stored.

Normalising each channel by a calibrated mean and scale makes the channels of a block alike, so that one step serves
them all: the keys of some models have channels with constant offsets many times their spread (Liu et al. 2024, KIVI).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.vtq.basis import sketch_basis

SCALE_FLOOR = 0.01
"""Smallest channel scale, as a fraction of the root mean square of the scales of its head: a channel that hardly moved
in the calibration text must not blow up the block it shares with others."""

INTERLEAVED = frozenset(
    {"codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4v_text"}
    | {"gptj", "helium", "llama4_text", "moonshine"}
)
"""Model types whose rotary pairs are channels (2i, 2i+1); in the others pair i is (i, i + rotary_dim/2)."""


Runs = tuple[tuple[int, int, int], ...]
"""Runs (place, channel, length): stored places place .. place+length-1 hold the channels channel ..
channel+length-1."""


def permute_channels(x: Tensor, runs: Runs) -> Tensor:
    """`x` [..., D] in stored order."""
    return torch.cat([x[..., channel : channel + width] for _, channel, width in runs], -1)


@dataclass(frozen=True)
class ChannelStats:
    """Statistics of one layer: mean and scale of post-RoPE K and of V, float32 [H, D], and `order`, int64 [D].

    ``order[i]`` is the channel stored at place i of K: its first D/2 entries are the channels that RoPE rotates
    slowest. V keeps its order. `key_basis`, float32 [H, D, D], is the basis of the sketches (see
    :mod:`hisparse.vtq.basis`); None takes the normalised channels as they are. Raises FormatError for shapes that
    differ, a scale that is not positive, or an order that is not a permutation; tensors of the meta device have no
    values to look at.
    """

    k_mean: Tensor
    k_scale: Tensor
    v_mean: Tensor
    v_scale: Tensor
    order: Tensor
    key_basis: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.k_mean.shape)
        if len(shape) != 2:
            raise FormatError(f"channel statistics: k_mean has shape {list(shape)}; it must be [KV heads, head_dim]")
        for name in ("k_mean", "k_scale", "v_mean", "v_scale"):
            value: Tensor = getattr(self, name)
            if tuple(value.shape) != shape or value.dtype != torch.float32:
                raise FormatError(
                    f"channel statistics: {name} is {value.dtype} {list(value.shape)}; it must be float32 {list(shape)}"
                )
            if value.is_meta:
                continue
            if not bool(value.isfinite().all()) or (name.endswith("scale") and not bool((value > 0).all())):
                raise FormatError(f"channel statistics: {name} holds inf, NaN or a scale <= 0; calibrate again")
            if not value.is_contiguous():  # kernels read rows of [H, D]
                object.__setattr__(self, name, value.contiguous())
        basis = self.key_basis
        if basis is not None and (
            tuple(basis.shape) != (*shape, shape[1]) or not (basis.is_meta or bool(basis.isfinite().all()))
        ):
            raise FormatError(
                f"channel statistics: key_basis is {list(basis.shape)} or holds inf or NaN; it must be finite "
                f"{[*shape, shape[1]]}"
            )
        if self.order.is_meta:
            return
        if self.order.tolist() != self.order.long().tolist() or sorted(self.order.tolist()) != list(range(shape[1])):
            raise FormatError(f"channel statistics: order is not a permutation of the {shape[1]} channels")
        object.__setattr__(self, "order", self.order.long().contiguous())  # as kernels read it

    @classmethod
    def identity(cls, heads: int, head_dim: int, order: Tensor | None = None) -> ChannelStats:
        """Mean 0 and scale 1: values are stored as they are."""
        zero = torch.zeros(heads, head_dim, dtype=torch.float32)
        one = torch.ones_like(zero)
        return cls(zero, one, zero, one, torch.arange(head_dim) if order is None else order)

    @property
    def heads(self) -> int:
        return self.k_mean.shape[0]

    @property
    def head_dim(self) -> int:
        return self.k_mean.shape[1]

    @cached_property
    def k_rate(self) -> Tensor:
        """float32 [H, D], ``1 / k_scale``."""
        return self.k_scale.reciprocal()

    @cached_property
    def v_rate(self) -> Tensor:
        """float32 [H, D], ``1 / v_scale``."""
        return self.v_scale.reciprocal()

    @cached_property
    def sketch_basis(self) -> Tensor:
        """float32 [H, D, D]: ``(k - k_mean) @ sketch_basis`` are the coordinates of a sketch, most important first."""
        return torch.diag_embed(self.k_scale.reciprocal()) if self.key_basis is None else self.key_basis

    @cached_property
    def query_basis(self) -> Tensor:
        """float32 [H, D, D]: ``q @ query_basis`` are a query's coordinates; products with the keys' are scores."""
        inverse: Tensor = torch.linalg.inv(self.sketch_basis.double())
        return inverse.mT.float().contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of all statistics: they belong to the model, not to a context."""
        tensors = (self.k_mean, self.k_scale, self.v_mean, self.v_scale, self.order, self.key_basis)
        return sum(t.nbytes for t in tensors if t is not None)

    @cached_property
    def runs(self) -> Runs:
        """`order` as runs of adjacent channels, none across the middle: a few copies of slices replace a gather."""
        runs: list[tuple[int, int, int]] = []
        for place, channel in enumerate(self.order.tolist()):
            if runs and channel == runs[-1][1] + runs[-1][2] and place != self.head_dim // 2:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((place, channel, 1))
        return tuple(runs)

    def to(self, device: torch.device | str) -> ChannelStats:
        """The same statistics on `device`; self where they are there already."""
        if self.k_mean.device == torch.device(device):
            return self
        k_mean, k_scale = self.k_mean.to(device), self.k_scale.to(device)
        basis = None if self.key_basis is None else self.key_basis.to(device)
        moved = ChannelStats(
            k_mean, k_scale, self.v_mean.to(device), self.v_scale.to(device), self.order.to(device), basis
        )
        moved.__dict__["runs"] = self.runs  # a cached property, which would read the order back
        return moved


def channel_order(config: Any, head_dim: int | None = None) -> Tensor:
    """Channel permutation of K, int64 [D]: the slower half of the RoPE frequencies first, each half in channel order.

    `config` is a transformers config (of a text model, or one that has a `text_config`). RoPE (Su et al. 2021) turns
    pair i by position * theta^(-2i/rotary_dim), so the later pairs are the slower; channels that are not rotated are
    the slowest. Frequency scaling (linear, dynamic, YaRN, Llama 3) and different theta per layer do not change that
    order. Models without RoPE parameters get the half-split order, which is then arbitrary but valid.
    """
    config = getattr(config, "text_config", None) or config
    if head_dim is None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = 2 * (rotary_dim(config, head_dim) // 2)
    index = torch.arange(head_dim)
    pair = index // 2 if config.model_type in INTERLEAVED else index % max(rotary // 2, 1)
    slowness = torch.where(index < rotary, pair, head_dim)
    slow_first = torch.argsort(slowness, descending=True, stable=True)
    half = head_dim // 2
    return torch.cat([slow_first[:half].sort().values, slow_first[half:].sort().values])


def rotary_dim(config: Any, head_dim: int) -> int:
    """Channels of a head that RoPE rotates: `rotary_dim`, or head_dim times the partial rotary factor of the config."""
    explicit = getattr(config, "rotary_dim", None)
    if isinstance(explicit, int):
        return min(explicit, head_dim)
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]
    factor = rope.get("partial_rotary_factor")
    if factor is None:
        factor = getattr(config, "partial_rotary_factor", None) or 1.0
    return min(int(head_dim * factor), head_dim)


def floor_scales(scale: Tensor) -> Tensor:
    """Standard deviations [..., D], at least SCALE_FLOOR of their head's root mean square; 1 for a head of zeros."""
    floor = SCALE_FLOOR * scale.square().mean(-1, keepdim=True).sqrt()
    floored = torch.maximum(scale, floor)
    return torch.where(floored > 1e-20, floored, torch.ones_like(floored))


def estimate_stats(k: Tensor, v: Tensor, order: Tensor, q: Tensor | None = None) -> ChannelStats:
    """Statistics from the tokens at hand, for models without a calibration file.

    `k` (post-RoPE) and `v` are [..., H, D] of any float dtype, `q` the queries [..., Hq, D] where they are known; all
    leading dimensions are averaged over. Raises FormatError where K or V hold inf or NaN, or no token.
    """
    moments: list[Tensor] = []
    for name, x in (("K", k), ("V", v)):
        rows = x.detach().reshape(-1, *x.shape[-2:]).float()
        if not len(rows) or not bool(rows.isfinite().all()):
            what = "inf or NaN" if len(rows) else "no token"
            raise FormatError(
                f"estimate_stats: {name} holds {what}; statistics need finite values of one token or more"
            )
        moments += [rows.mean(0), floor_scales(rows.std(0, correction=0))]
    k_mean, k_scale, v_mean, v_scale = moments
    centred = (k.detach().reshape(-1, *k.shape[-2:]).float() - k_mean).double().transpose(0, 1)  # [H, T, D]
    moment = torch.eye(k.shape[-1], dtype=torch.float64, device=k.device).expand(k.shape[-2], -1, -1)
    if q is not None:
        grouped = group_queries(q.detach().reshape(-1, *q.shape[-2:]).double().transpose(0, 1), k.shape[-2])
        # Fewer queries than channels say nothing about most directions; then all count alike.
        moment = grouped.mT @ grouped / grouped.shape[1] if grouped.shape[1] >= k.shape[-1] else moment
    basis = sketch_basis(centred.mT @ centred / centred.shape[1], moment)
    return ChannelStats(k_mean, k_scale, v_mean, v_scale, order.to(k.device), basis)


def group_queries(q: Tensor, kv_heads: int) -> Tensor:
    """Queries [Hq, T, D] by the KV head that they read: [H, Hq / H * T, D]."""
    return q.reshape(kv_heads, -1, q.shape[-1])
