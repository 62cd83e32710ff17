"""What an engine is asked for at its start, tried with a small model of random weights."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_tools import CALIBRATION, MIB, RAW, SMALL, engine, generate, metric, random_prompts, runtime

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, HiSparseError, UnsupportedError


def options(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(model), **SMALL, **more}


@pytest.mark.parametrize("longest", [2, 257, 777])
def test_odd_lengths(longest: int, small_model: Path) -> None:
    """Requests that fill the greatest length to its last token: the stock engine's tokens, and packed ones as many."""
    prompts = random_prompts(1, max(longest // 2, 1), longest - 1)
    found = []
    for config in (None, {**RAW, "tlif": {"prefix_length": 24}}, {"tlif": {"prefix_length": 24}}):
        with engine(config, 64 * MIB, 64, **options(small_model, max_model_len=longest)) as llm:
            found.append(generate(llm, prompts, 20, detokenize=False))
    assert found[1] == found[0]
    lengths = [min(20, longest - len(prompt)) for prompt in prompts]
    assert [len(tokens) for (tokens,) in found[2]] == lengths


def test_options_are_read_from_a_file(small_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "hi-sparse-config.json"
    path.write_text(json.dumps({"selection": {"sketch_bits": 1}, "tlif": {"prefix_length": 24}}))
    given = {"hisparse": str(path), "hisparse_block_tokens": 64, "hisparse_calibration": str(small_model / CALIBRATION)}
    with engine({}, 32 * MIB, **options(small_model, additional_config=given)) as llm:
        assert runtime().config == HiSparseConfig.load(path)
        assert runtime().layout.tokens == 64
        generate(llm, random_prompts(300), 8, detokenize=False)
        assert runtime().statistics()["recalled_rows"] > 0


def test_samples_of_a_prompt_are_those_of_as_many_requests(small_model: Path) -> None:
    """vLLM seeds the samples of a request one after the other."""
    prompts, sampling = random_prompts(300, 500), {"temperature": 0.9, "detokenize": False}
    with engine({"tlif": {"prefix_length": 24}}, 32 * MIB, 64, **options(small_model)) as llm:
        generate(llm, prompts, 1, detokenize=False)  # so that all find the same blocks
        together = generate(llm, prompts, 70, n=3, seed=7, **sampling)
        apart = [generate(llm, prompts, 70, seed=7 + number, **sampling) for number in range(3)]
        assert metric(llm, "vllm:prefix_cache_hits") == 6 * (256 + 448)
        assert runtime().statistics()["recalled_rows"] > 0
    assert together == [[run[prompt][0] for run in apart] for prompt in range(2)]
    assert [len({tuple(tokens) for tokens in samples}) for samples in together] == [3, 3]


@pytest.fixture
def unweighted(small_model: Path, tmp_path: Path) -> Path:
    """The model's folder without its weights: an engine that gets as far as reading them fails otherwise."""
    shutil.copy(small_model / "config.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("additional", "more", "error", "said"),
    [
        ({"hisparse": {"hidden_size": 2048}}, {}, ConfigError, "hidden_size = 2048, but the model's weights have 128"),
        ({"hisparse": {"evicts": "none"}}, {}, ConfigError, "evicts"),
        ({"hisparse": "nowhere.json"}, {}, ConfigError, "nowhere.json: cannot be read"),
        ({"hisparse_calibration": "nowhere"}, {}, HiSparseError, "nowhere: no such file"),
        ({"hisparse_block": 64}, {}, ConfigError, 'unknown key "hisparse_block"'),
        ({"hisparse_block_tokens": 100, "hisparse": {"vtq": {"page_size": 16}}}, {}, ConfigError, "tokens = 100"),
        ({}, {"kv_cache_dtype": "fp8"}, UnsupportedError, "--kv-cache-dtype fp8 with .* leave it out"),
        (
            {},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            UnsupportedError,
            "speculative decoding",
        ),
    ],
    ids=["hidden size", "key", "file", "calibration", "option", "block tokens", "fp8", "speculative decoding"],
)
def test_what_cannot_work_is_refused_before_weights_are_read(
    additional: dict[str, Any], more: dict[str, Any], error: type[HiSparseError], said: str, unweighted: Path
) -> None:
    try:
        with (
            pytest.raises(error, match=said),
            engine({}, 32 * MIB, **options(unweighted, additional_config=additional, **more)),
        ):
            pass
    finally:
        # vLLM's n-gram drafts bring numba along, and the next engine in this process would stumble over llvmlite: vLLM
        # looks at every attribute of every module, and one of llvmlite's has no dictionary.
        for name in [name for name in sys.modules if name.split(".")[0] in ("llvmlite", "numba") or "ngram" in name]:
            del sys.modules[name]


def test_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import DeepseekV3Config

    small = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 64}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
    }
    config = DeepseekV3Config(vocab_size=512, max_position_embeddings=1024, **small, **heads, **experts)
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="MLA"), engine({}, 32 * MIB, **options(tmp_path)):
        pass
