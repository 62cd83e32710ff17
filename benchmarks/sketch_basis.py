"""How well sketches estimate attention scores: the query-weighted basis beside a Hadamard rotation with the same bits.

    python benchmarks/sketch_basis.py --text book.txt --json benchmarks/results/sketch-basis.json

Runs a model over a text, takes the queries of its last tokens and the keys of all earlier ones, and reports, over
layers: the standard deviation of (estimated - exact) scores, and the share of the attention mass on set-aside tokens
that a budget of recalled tokens misses, beside the mass an oracle with exact scores would miss. The Hadamard baseline
normalises channels, rotates, and rounds every channel to the same number of bits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hisparse.cache.geometry import SINKS
from hisparse.evaluate.environment import environment
from hisparse.identity import ModelIdentity
from hisparse.models import load_model
from hisparse.ops.select import select_rows
from hisparse.ops.sketch import build_sketch, score_sketch
from hisparse.vtq.calibration import calibration_for
from hisparse.vtq.stats import ChannelStats

ROW, TAIL, QUERIES = 4, 128, 32
STEP = {1: 1.5958, 2: 0.9957}  # uniform quantisers of least squared error for a standard normal (Max, 1960)


def capture(model: Any, ids: Tensor) -> dict[int, tuple[Tensor, Tensor, float]]:
    """Per layer: the last queries [Hq, QUERIES, D], all keys [H, T, D], and the scaling."""
    seen: dict[int, tuple[Tensor, Tensor, float]] = {}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        seen[module.layer_idx] = (query[0, :, -QUERIES:].contiguous(), key[0].contiguous(), kwargs["scaling"])
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("sketch_benchmark", attention)
    AttentionMaskInterface.register("sketch_benchmark", sdpa_mask)
    model.set_attn_implementation("sketch_benchmark")
    with torch.inference_mode():
        model(ids, use_cache=False, logits_to_keep=1)
    return seen


def hadamard(q: Tensor, k: Tensor, stats: ChannelStats, scaling: float, bits: int) -> Tensor:
    """Scores [Hq, T, n] from normalised, rotated, rounded keys k [H, n, D]; scale exact for the key itself."""
    heads, _, dim = k.shape
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix / dim**0.5
    x = ((k - stats.k_mean[:, None]) / stats.k_scale[:, None]) @ matrix
    step = x.square().mean(-1, keepdim=True).sqrt() * STEP[bits]
    levels = (x / step + 2**bits / 2).floor().clamp(0, 2**bits - 1) - (2**bits - 1) / 2
    scale = x.square().sum(-1, keepdim=True) / (x * levels).sum(-1, keepdim=True)
    grouped = q.view(heads, -1, dim) * scaling
    scores = (grouped * stats.k_scale[:, None]) @ matrix @ (levels * scale).mT + grouped @ stats.k_mean[..., None]
    return scores.view(q.shape[0], q.shape[1], -1)


def missed(scores: Tensor, mass: Tensor, budget: int) -> float:
    """Share of `mass` [Hq, T, n] outside the rows that `scores` would recall, each query on its own."""
    found = 0.0
    for t in range(scores.shape[1]):
        rows = select_rows(scores[:, t : t + 1], ROW, budget // ROW)
        found += float(mass[:, t].view(len(mass), -1, ROW)[:, rows].sum())
    return 1 - found / float(mass.sum())


def measure(model: Any, ids: Tensor, budget: int) -> dict[str, dict[str, float]]:
    calibration = calibration_for(ModelIdentity.of(model))
    if calibration is None:
        raise SystemExit("no calibration for this model; make one with `hisparse calibrate`")
    sums: dict[str, list[tuple[float, float]]] = {}
    for layer, (q, k, scaling) in sorted(capture(model, ids).items()):
        stats, heads = calibration[layer], k.shape[0]
        end = (k.shape[1] - TAIL - SINKS) // ROW * ROW + SINKS
        aside, dense = k[:, SINKS:end], torch.cat([k[:, :SINKS], k[:, end:-QUERIES]], 1)
        grouped = q.view(heads, -1, q.shape[-1]) * scaling
        exact = (grouped @ aside.mT).view(*q.shape[:2], -1)
        near = (grouped @ dense.mT).view(*q.shape[:2], -1)
        mass = torch.cat([near, exact], -1).softmax(-1)[..., near.shape[-1] :]
        rows = aside.transpose(0, 1).reshape(-1, ROW, heads, aside.shape[-1])

        def basis(
            bits: int, q: Tensor = q, rows: Tensor = rows, stats: ChannelStats = stats, scaling: float = scaling
        ) -> Tensor:
            return score_sketch(q, *build_sketch(rows, stats, bits), stats, scaling)

        estimates: dict[str, Callable[[], Tensor]] = {
            "hadamard, 1 bit": lambda q=q, a=aside, s=stats, c=scaling: hadamard(q, a, s, c, 1),  # type: ignore[misc]
            "basis, 1 bit": lambda f=basis: f(1),  # type: ignore[misc]
            "hadamard, 2 bits": lambda q=q, a=aside, s=stats, c=scaling: hadamard(q, a, s, c, 2),  # type: ignore[misc]
            "basis, 2 bits": lambda f=basis: f(2),  # type: ignore[misc]
            "exact scores": lambda e=exact: e,  # type: ignore[misc]
        }
        for name, estimate in estimates.items():
            scores = estimate()
            error = scores - exact
            spread = float((error - error.mean(-1, keepdim=True)).std())
            sums.setdefault(name, []).append((spread, missed(scores, mass, budget)))
    return {
        name: {
            "score_error": sum(e for e, _ in values) / len(values),
            "missed_mass": sum(m for _, m in values) / len(values),
        }
        for name, values in sums.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--budget", type=int, default=512, help="tokens recalled by a query")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model)
    text = options.text.read_text(encoding="utf-8")
    ids = tokenizer(text[40000 : 40000 + 8 * options.tokens], return_tensors="pt").input_ids[:, : options.tokens]
    result = measure(model, ids, options.budget)
    for name, figures in result.items():
        print(f"{name:18s} score error {figures['score_error']:.3f}   missed mass {figures['missed_mass']:.4f}")
    if options.json:
        data = {"tokens": ids.shape[1], "budget": options.budget, "text": options.text.name, "rows": result}
        options.json.write_text(json.dumps({**environment(torch.device("cpu")), **data}, indent=2) + "\n")


if __name__ == "__main__":
    main()
