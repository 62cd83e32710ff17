"""Small random models whose attention is sharp enough that a wrong key shows, and an attention oracle in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hisparse.config import HiSparseConfig
from hisparse.integrations.transformers import HiSparseCache
from hisparse.integrations.transformers.cache import HiSparseLayer
from hisparse.ops.unpack import unpack_pages

PREFIX = 16
VOCAB = 97
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma3_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
        "query_pre_attn_scalar": 16,
    },
    "glm4": {},
    "glm": {},
}


def tiny(kind: str = "llama", seed: int = 0, attention: str = "hisparse", **extra: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**sizes, **MODELS.get(kind, {}), **extra})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "proj" in name or "embed" in name:
            weight.data.mul_(10)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    model.set_attn_implementation(attention)
    return model


def prompt(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def settings_of(**sections: Any) -> HiSparseConfig:
    """Configuration with a short tail and an untrained scorer; sections override."""
    tlif = {"scorer": "random", "prefix_length": PREFIX, **sections.pop("tlif", {})}
    budget = {"capacity": None, "max_keep": 0.4, **sections.pop("budget", {})}
    return HiSparseConfig(tlif=tlif, budget=budget, **sections)


RAW = settings_of(evict="none", vtq={"enable_per_block_quant": False})


def cache_for(model: Any, config: HiSparseConfig = RAW, **extra: Any) -> HiSparseCache:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no TLIF and no calibration for a random model
        return HiSparseCache(model, config, **extra)


def greedy(model: Any, ids: Tensor, cache: Any = None, new: int = 24, **extra: Any) -> Tensor:
    extra = {"do_sample": False, "attention_mask": torch.ones_like(ids), **extra}
    out: Tensor = model.generate(ids, past_key_values=cache, max_new_tokens=new, **extra)
    return out


def dense(model: Any, ids: Tensor, new: int = 24, **extra: Any) -> Tensor:
    """What the stock attention and cache give."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    out = greedy(model, ids, None, new, **extra)
    model.set_attn_implementation(before)
    return out


def left_padded(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(len(t) for t in texts)
    ids = torch.stack([torch.nn.functional.pad(t, (width - len(t), 0)) for t in texts])
    mask = torch.stack([torch.arange(width) >= width - len(t) for t in texts])
    return ids, mask.long()


@dataclass
class Watcher:
    """Recomputes the attention of every HiSparse layer from what the pools hold, and compares.

    Every key and value is recorded as it arrives. Before each chunk the past is put together by position: what is
    dense from the record, what is packed from the pools, what is gone nowhere. `chosen(row)` tells which rows the
    queries of a batch row read; all where it returns None.
    """

    tolerance: float = 2e-5
    chosen: Callable[[int], list[Tensor] | None] = lambda row: None
    compared: int = 0
    worst: float = 0.0
    record: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    places: list[tuple[Any, ...]] = field(default_factory=list)

    def install(self, monkeypatch: Any) -> Watcher:
        original = HiSparseLayer.attend_and_commit

        def watched(layer: HiSparseLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
            if layer.first:
                self.places = [
                    (s.length, *s.positions(), list(s.pages), list(s.rows))
                    for s in (p.sequence for p in layer.shared.planners)
                ] or [(0, *[np.empty(0, int)] * 3, [], [])] * len(q)
            pasts = [self.past(layer, row) for row in range(len(q))]  # before the commit moves anything
            out = original(layer, q, k, v, mask, scale)
            for row, past in enumerate(pasts):
                real = torch.arange(q.shape[2]) if mask is None else mask[row, -q.shape[2] :].nonzero().flatten()
                self.compare(layer, row, q[row][:, real], k[row][:, real], v[row][:, real], past, scale, out[row, real])
            return out

        monkeypatch.setattr(HiSparseLayer, "attend_and_commit", watched)
        return self

    def past(self, layer: HiSparseLayer, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
        """K, V float64 [H, length, D] by position, bool [length] of what is held, and positions of each row."""
        length, dense_at, kept_at, aside_at, pages, rows = self.places[row]
        store = layer.store
        assert store is not None
        shape = (store.geometry.heads, length, store.geometry.head_dim)
        k, v, held = np.zeros(shape), np.zeros(shape), np.zeros(length, bool)
        if length:
            exact = self.record[layer.index, row]
            k[:, dense_at], v[:, dense_at] = (x.double().numpy()[:, dense_at] for x in exact)
        held[dense_at] = True
        for at, ids, pool, fmt in (
            (kept_at, pages, store.kept, store.page_format),
            (aside_at, rows, store.rows, store.row_format),
        ):
            if len(ids):
                pages = pool.read(torch.tensor(ids), store.device)
                new_k, new_v = unpack_pages(pages, store.stats, fmt, torch.float32)
                k[:, at] = new_k.flatten(0, 1).transpose(0, 1).double().numpy()
                v[:, at] = new_v.flatten(0, 1).transpose(0, 1).double().numpy()
                assert not held[at].any()
                held[at] = True
        return k, v, held, list(aside_at.reshape(-1, store.row_format.tokens))

    def compare(
        self, layer: HiSparseLayer, row: int, q: Tensor, k: Tensor, v: Tensor,
        past: tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]], scale: float, found: Tensor,
    ) -> None:  # fmt: skip
        exact = self.record.get((layer.index, row))
        self.record[layer.index, row] = (
            [k, v] if exact is None else [torch.cat(p, 1) for p in zip(exact, (k, v), strict=True)]
        )
        past_k, past_v, held, rows = past
        chosen = self.chosen(row) if rows else None
        new_k, new_v = k.double().numpy(), v.double().numpy()
        heads, chunk = len(k), q.shape[1]
        for t in range(chunk):
            seen = held.copy()
            if chosen is not None:
                seen[np.concatenate(rows)] = False
                for number in chosen[t if len(chosen) > 1 else 0].tolist():
                    seen[rows[number]] = True
            keys = np.concatenate([past_k[:, seen], new_k[:, : t + 1]], 1)
            values = np.concatenate([past_v[:, seen], new_v[:, : t + 1]], 1)
            for g in range(len(q)):
                h = g // (len(q) // heads)
                score = keys[h] @ q[g, t].double().numpy() * scale
                weight = np.exp(score - score.max())
                want = weight @ values[h] / weight.sum()
                self.worst = max(
                    self.worst, float(np.abs(found[t, g].double().numpy() - want).max() / np.abs(values[h]).max())
                )
        assert self.worst < self.tolerance, f"layer {layer.index}, row {row}, after {len(held)} tokens: {self.worst}"
        self.compared += chunk
