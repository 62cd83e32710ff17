"""TLIF and calibration of the model that vLLM serves."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import UnsupportedError
from hisparse.identity import ModelIdentity, embedding_sample
from hisparse.integrations.vllm.options import Options
from hisparse.tlif import Scorer, scorer_for
from hisparse.tlif.scorer import NoveltyScorer, RandomScorer
from hisparse.vtq.calibration import calibration_for
from hisparse.vtq.stats import ChannelStats

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")


def find_embedding(model: str) -> Tensor | None:
    """The input embedding [V, H] in a checkpoint on this machine; None where there is none in safetensors."""
    from safetensors import safe_open

    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model, "config.json")
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        weights: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / file for name, file in weights.items() if name.endswith(_EMBEDDINGS)]
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name.endswith(_EMBEDDINGS):
                    found: Tensor = handle.get_tensor(name)
                    return found
    return None


def identify(vllm_config: Any) -> ModelIdentity | None:
    """Which model is served, by its configuration and the embedding in its checkpoint; None without a checkpoint."""
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return None
    weight = find_embedding(str(model.model))
    if weight is None:
        return None
    text = model.hf_text_config
    return ModelIdentity(
        model_type=str(text.model_type),
        hidden_size=int(text.hidden_size),
        layers=int(text.num_hidden_layers),
        heads=int(text.num_attention_heads),
        kv_heads=int(model.get_total_num_kv_heads()),
        head_dim=int(model.get_head_size()),
        vocab_size=int(weight.shape[0]),
        sample=embedding_sample(weight),
    )


def companions(vllm_config: Any, options: Options, from_start: bool = True) -> tuple[Scorer, list[ChannelStats] | None]:
    """Scorer and channel statistics of the model, all KV heads; None: to be estimated from the first packed tokens.

    from_start: the values that are scored are those of the model's first layer, which a TLIF learns from. Raises
    ModelError for given files of another model, UnsupportedError for a TLIF that has nothing to read.
    """
    identity, tlif = identify(vllm_config), options.config.tlif
    if not from_start:
        if options.tlif is not None:
            raise UnsupportedError(
                "hisparse_tlif: a TLIF reads the values of the model's first layer, which has another backend here; "
                "leave it out"
            )
        scorer: Scorer = RandomScorer() if tlif.scorer == "random" else NoveltyScorer(tlif.prefix_length)
        return scorer, None if identity is None else calibration_for(identity, options.calibration)
    if identity is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            scorer = scorer_for(identity, tlif, options.tlif)
        stats = calibration_for(identity, options.calibration)
        if stats is None:
            warnings.warn(
                "no calibration for this model: channel statistics are estimated from the first tokens that are "
                "packed. Make one with `hisparse calibrate`",
                stacklevel=2,
            )
        return scorer, stats
    from hisparse.tlif.store import load_tlif
    from hisparse.vtq.calibration import load_calibration

    stats = None if options.calibration is None else load_calibration(options.calibration, None)
    if options.tlif is not None:
        return load_tlif(options.tlif, None, tlif), stats
    return RandomScorer() if tlif.scorer == "random" else NoveltyScorer(tlif.prefix_length), stats


def of_rank(stats: ChannelStats, rank: int, heads: int, total: int, ranks: int) -> ChannelStats:
    """The statistics of this rank's `heads` KV heads of `total`, which `ranks` tensor-parallel ranks share."""
    first = rank * total // ranks
    part = slice(first, first + heads)
    basis = None if stats.key_basis is None else stats.key_basis[part].contiguous()
    k_mean, k_scale, v_mean, v_scale = (
        x[part].contiguous() for x in (stats.k_mean, stats.k_scale, stats.v_mean, stats.v_scale)
    )
    return ChannelStats(k_mean, k_scale, v_mean, v_scale, stats.order, basis)


def choose_kept(scorer: Scorer, values: Tensor, number: int, head: int) -> Tensor:
    """Which tokens of full blocks are kept: bool [m, W], `number` a block, none of its first `head` tokens.

    values [m, W, F]: layer 0's value rows. Each block is scored by itself, so that the choice is a function of the
    block's tokens alone and a block may be shared by requests.
    """
    importance = torch.stack([scorer.score(rows, None)[0] for rows in values])
    importance[:, :head] = -1.0
    best = importance.topk(number, dim=1).indices
    return torch.zeros_like(importance, dtype=torch.bool).scatter_(1, best, True)
