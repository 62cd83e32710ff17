"""How many of a decode step's rows earlier steps wanted, too: ``python benchmarks/hot_rows.py --text book.txt``.

A real model reads the text and decodes its last tokens with recall; which rows each layer chose is written down.
Printed are the share of rows that the previous step had chosen, and the shares that hot buffers of several sizes (in
rows of a step, those used longest ago make room) would have held. On a CPU it takes minutes.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from hisparse.cache.layer import LayerStore
from hisparse.config import HiSparseConfig, SelectionConfig
from hisparse.evaluate.environment import environment
from hisparse.integrations.transformers import HiSparseCache
from hisparse.models import load_model

FACTORS = (1.0, 2.0, 4.0)
WARM = 32
"""Steps before any are counted: a buffer that is empty misses everything."""


def buffer_hits(steps: list[set[int]], factor: float) -> float:
    """Share of the rows of steps from WARM on that a buffer of ``factor`` times a step's rows would have held."""
    used: dict[int, int] = {}
    hits = wanted = 0
    for number, rows in enumerate(steps):
        if number >= WARM:
            hits, wanted = hits + len(rows & used.keys()), wanted + len(rows)
        used |= dict.fromkeys(rows, number)
        surplus = max(0, len(used) - int(factor * len(rows)))
        for row in sorted(used, key=used.__getitem__)[:surplus]:
            del used[row]
    return hits / wanted


def measure(chosen: dict[int, list[set[int]]]) -> dict[str, Any]:
    """Means over layers. chosen: of each layer, the rows of each step."""
    layers = list(chosen.values())
    previous = [
        sum(len(a & b) for a, b in zip(steps[WARM - 1 :], steps[WARM:], strict=False)) / sum(map(len, steps[WARM:]))
        for steps in layers
    ]
    found: dict[str, Any] = {"rows_a_step": len(layers[0][-1]), "previous": round(sum(previous) / len(layers), 3)}
    for factor in FACTORS:
        each = [buffer_hits(steps, factor) for steps in layers]
        found[f"hits_{factor:g}"] = round(sum(each) / len(each), 3)
        found[f"lowest_layer_{factor:g}"] = round(min(each), 3)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--start", type=int, default=0, help="character of the text to begin with")
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--decoded", type=int, default=128, help="the last so many of the tokens")
    parser.add_argument("--share", type=float, nargs="*", default=[], help="of the tokens, that a step recalls")
    parser.add_argument("--model", default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.decoded <= WARM:
        parser.error(f"--decoded {options.decoded}: give more than {WARM}, the steps that fill the buffers")
    model, tokenizer = load_model(options.model) if options.model else load_model()
    text = options.text.read_text(encoding="utf-8")[options.start : options.start + 8 * options.tokens]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
    if ids.shape[1] < options.tokens:
        parser.error(f"{options.text} has {ids.shape[1]} tokens from character {options.start} on; give a longer text")
    model.set_attn_implementation("hisparse")
    chosen: dict[int, list[set[int]]] = defaultdict(list)
    original = LayerStore._choose

    def choose(layer: LayerStore, *arguments: Any) -> Any:
        rows = original(layer, *arguments)
        chosen[id(layer)].append(set(rows.tolist()))
        return rows

    LayerStore._choose = choose  # type: ignore[method-assign]
    first, rows = options.tokens - options.decoded, []
    for share in options.share or [None]:
        chosen.clear()
        fixed = {} if share is None else {"min_tokens": max(4, round(share * options.tokens)), "root_factor": 0.0}
        cache = HiSparseCache(model, HiSparseConfig(selection=SelectionConfig(**fixed)))
        model(ids[:, :first], past_key_values=cache, logits_to_keep=1)
        for i in range(first, options.tokens):
            model(ids[:, i : i + 1], past_key_values=cache)
        rows.append({"text": options.text.stem, "start": options.start, "share": share, **measure(chosen)})
        print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        record = {"tokens": options.tokens, "decoded": options.decoded, "model": options.model or "default"}
        options.json.write_text(json.dumps({**environment(model.device), **record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
