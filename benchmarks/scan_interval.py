"""What fewer scans of the sketches cost: ``python benchmarks/scan_interval.py --text book.txt --start 20000``.

One prefill of the default model, then the same tokens decoded at several settings of `selection.scan_interval`,
`selection.hot_factor` and `selection.share_layers`, each beside the dense cache: mean KL, perplexity ratio, share of
equal best tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from hisparse.config import HiSparseConfig, SelectionConfig
from hisparse.evaluate.fidelity import dense_logits, divergence
from hisparse.integrations.transformers import HiSparseCache
from hisparse.models import load_model


def with_settings(cache: HiSparseCache, interval: int, hot_factor: float, share: int) -> HiSparseCache:
    """A copy of a filled cache that goes on with other settings."""
    cache = copy.deepcopy(cache)
    update = {"scan_interval": interval, "hot_factor": hot_factor, "share_layers": share}
    selection = cache.config.selection.model_copy(update=update)
    cache.config = cache.config.model_copy(update={"selection": selection})
    cache.geometry = cache.shared.geometry = replace(cache.geometry, config=cache.config)
    for part in (*cache.planners, *cache.stores):
        part.geometry = cache.geometry
    return cache


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--start", type=int, default=0, help="character of the text to begin with")
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--decoded", type=int, default=256, help="the last so many of the tokens")
    settings = ["1:2", "2:2", "4:2", "4:4", "1:2:2", "1:2:3"]
    parser.add_argument("--settings", nargs="*", default=settings, help="interval:hot_factor, or with :share_layers")
    parser.add_argument("--bits", type=int, choices=(1, 2), default=2, help="of a sketch, a channel")
    parser.add_argument("--model", default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model) if options.model else load_model()
    text = options.text.read_text(encoding="utf-8")[options.start : options.start + 8 * options.tokens]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens + 1]
    if ids.shape[1] <= options.tokens:
        parser.error(f"{options.text} has {ids.shape[1]} tokens from character {options.start} on; give a longer text")
    with tempfile.TemporaryDirectory() as folder:
        dense = dense_logits(model, ids, options.decoded, Path(folder))
    model.set_attn_implementation("hisparse")
    filled = HiSparseCache(model, HiSparseConfig(selection=SelectionConfig(sketch_bits=options.bits)))
    first = options.tokens - options.decoded
    model(ids[:, :first], past_key_values=filled, logits_to_keep=1)
    rows = []
    for setting in options.settings:
        interval, hot_factor, share = (*setting.split(":"), "1")[:3]
        cache = with_settings(filled, int(interval), float(hot_factor), int(share))
        logits = [model(ids[:, i : i + 1], past_key_values=cache).logits[0, -1] for i in range(first, options.tokens)]
        found = divergence(dense, torch.stack(logits), ids[0, -options.decoded :]).to_json()
        row = {"text": options.text.stem, "start": options.start, "scan_interval": int(interval)}
        row |= {"hot_factor": float(hot_factor), "share_layers": int(share), "sketch_bits": options.bits}
        row |= {"mean_kl": round(found["mean_kl"], 5)}
        row |= {"ratio": round(found["perplexity_ratio"], 5), "agree": found["argmax_agreement"]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"tokens": options.tokens, "decoded": options.decoded, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
