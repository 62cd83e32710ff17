"""How far a cache's next-token distributions are from the dense cache's, on held-out text decoded token by token."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from hisparse.errors import InputError
from hisparse.evaluate.caches import CacheFactory, DenseCaches, feed
from hisparse.identity import ModelIdentity

_ROWS = 16  # distributions compared at once in float64: 16 x 152 000 x 8 bytes is 19 MB


@dataclass(frozen=True)
class Divergence:
    """Per decoded token, float64 [n] each: KL(dense || ours) in nats, surprisal of the true token, equal argmax."""

    kl: Tensor
    dense_nll: Tensor
    nll: Tensor
    agree: Tensor

    @classmethod
    def join(cls, parts: Sequence[Divergence]) -> Divergence:
        """All tokens of several windows."""
        names = ("kl", "dense_nll", "nll", "agree")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def to_json(self) -> dict[str, Any]:
        """KL: mean, quantiles, maximum. Perplexity: exp of the mean surprisal, and the ratio ours / dense."""
        dense, ours = float(self.dense_nll.mean()), float(self.nll.mean())
        return {
            "tokens": len(self.kl),
            "mean_kl": float(self.kl.mean()),
            "median_kl": float(self.kl.median()),
            "p99_kl": float(self.kl.quantile(0.99)),
            "max_kl": float(self.kl.max()),
            "dense_perplexity": math.exp(dense),
            "perplexity": math.exp(ours),
            "perplexity_ratio": math.exp(ours - dense),
            "argmax_agreement": float(self.agree.mean()),
        }


def divergence(dense: Tensor, ours: Tensor, targets: Tensor) -> Divergence:
    """Compare next-token logits [n, V] of the dense cache and ours; `targets` int64 [n] are the true next tokens.

    Computed in float64. Raises ArithmeticError where a logit is not finite: a fault in a cache, not in the input.
    """
    if dense.shape != ours.shape or len(targets) != len(dense) or not len(dense):
        raise InputError(
            f"logits {tuple(dense.shape)} and {tuple(ours.shape)} for {len(targets)} targets: they must be of one "
            "shape, a row a target, and at least one"
        )
    columns: list[list[Tensor]] = [[], [], [], []]
    for start in range(0, len(dense), _ROWS):
        rows = slice(start, start + _ROWS)
        p, q = (logits[rows].double().log_softmax(-1) for logits in (dense, ours))
        if not bool(torch.isfinite(p).all() and torch.isfinite(q).all()):
            raise ArithmeticError(f"logits that are not finite among decoded tokens {start} to {start + len(p) - 1}")
        true = targets[rows, None].to(p.device)
        # Rounding can leave a KL of two equal distributions a little below zero.
        columns[0].append((p.exp() * (p - q)).sum(-1).clamp_min(0))
        columns[1].append(-p.gather(-1, true)[:, 0])
        columns[2].append(-q.gather(-1, true.to(q.device))[:, 0])
        columns[3].append((p.argmax(-1) == q.argmax(-1)).double())
    kl, dense_nll, nll, agree = (torch.cat(column).cpu() for column in columns)
    return Divergence(kl, dense_nll, nll, agree)


def decode_logits(
    model: Any, factory: CacheFactory, window: Tensor, decoded: int, chunk: int | None = None
) -> tuple[Tensor, Any]:
    """Logits [decoded, V] of the true tokens fed one by one after a prefill, and the cache as it stands then.

    window int64 [1, N + 1]: N - decoded tokens are prefilled (in pieces of `chunk`, if given), then `decoded` tokens
    fed singly. Row i predicts window[N - decoded + 1 + i].
    """
    ids = window[:, :-1].to(model.device)
    past = ids.shape[1] - decoded
    cache = factory.new(model)
    feed(model, cache, ids[:, :past], chunk=chunk)
    rows = [feed(model, cache, ids[:, i : i + 1])[-1] for i in range(past, ids.shape[1])]
    return torch.stack(rows), cache


def dense_logits(model: Any, window: Tensor, decoded: int, scratch: Path | None = None) -> Tensor:
    """The dense cache's logits, float32 [decoded, V], for the same rows as :func:`decode_logits`.

    The last tokens go in as one piece, which is the same arithmetic as one by one up to rounding. With `scratch` the
    logits are kept in that folder, under a name made of the model's identity and dtype, the token ids and the version
    of PyTorch, and read from there the next time.
    """
    path = None if scratch is None else scratch / f"dense-{_key(model, window, decoded)}.safetensors"
    if path is not None and path.is_file():
        try:
            stored: Tensor = load_file(path)["logits"]
        except (SafetensorError, KeyError, OSError):
            path.unlink(missing_ok=True)  # damaged: made anew below
        else:
            return stored.to(model.device)
    ids = window[:, :-1].to(model.device)
    cache = DenseCaches().new(model)
    feed(model, cache, ids[:, :-decoded])
    logits = feed(model, cache, ids[:, -decoded:], keep=decoded).float().contiguous()
    if path is not None:
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(save({"logits": logits.cpu()}))
            part.replace(path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise InputError(f"--scratch {scratch}: cannot be written ({error}); name another folder") from None
    return logits


def _key(model: Any, window: Tensor, decoded: int) -> str:
    parts = [json.dumps(ModelIdentity.of(model).to_metadata(), sort_keys=True), str(model.dtype), torch.__version__]
    digest = hashlib.sha256("\n".join([*parts, str(decoded), *map(str, window[0].tolist())]).encode())
    return digest.hexdigest()[:32]


def check_decoded(tokens: int, decoded: int) -> None:
    """Raise InputError unless a window of `tokens` has `decoded` tokens to decode and one before them to prefill."""
    if not 1 <= decoded < tokens:
        raise InputError(
            f"{decoded} tokens to decode in a window of {tokens}: decode 1 to {tokens - 1}, so that one is left to "
            "prefill, or take a longer window"
        )


def fidelity(
    model: Any,
    windows: Sequence[Tensor],
    factories: Sequence[CacheFactory],
    decoded: int = 256,
    *,
    chunk: int | None = None,
    scratch: Path | None = None,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Divergence of each kind of cache from the dense one, over all `windows` (int64 [1, N + 1]) and in each.

    Returns {name: {..., "kv": bytes of the last window's cache, "windows": [...]}}; keys as :meth:`Divergence.to_json`.
    `progress` is called after the dense pass and after each kind, for each window. Raises InputError where a window
    leaves nothing to prefill.
    """
    if not windows or not factories:
        raise InputError(f"{len(windows)} windows on {len(factories)} kinds of cache: give at least one of each")
    check_decoded(min(window.shape[1] - 1 for window in windows), decoded)
    parts: dict[str, list[Divergence]] = {factory.name: [] for factory in factories}
    reports: dict[str, list[dict[str, Any]]] = {factory.name: [] for factory in factories}
    for window in windows:
        dense = dense_logits(model, window, decoded, scratch)
        progress()
        for factory in factories:
            ours, cache = decode_logits(model, factory, window, decoded, chunk)
            parts[factory.name].append(divergence(dense, ours, window[0, -decoded:]))
            reports[factory.name].append(factory.report(cache))
            del ours, cache
            progress()
    return {
        name: {
            **Divergence.join(found).to_json(),
            "capacity_min": min(float(report["capacity"]) for report in reports[name]),
            "kv": reports[name][-1],
            "windows": [part.to_json() for part in found],
        }
        for name, found in parts.items()
    }
