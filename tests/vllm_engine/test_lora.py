"""LoRA adapters are vLLM's own business: they change projections, and what HiSparse holds follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine_tools import MIB, RAW, engine, metric

HIDDEN, LAYERS, RANK = 128, 3, 8
PLAIN = {**RAW, "tlif": {"prefix_length": 24}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter of all projections of the attention, as PEFT writes it."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    folder = tmp_path_factory.mktemp("adapter")
    sizes = {"q_proj": HIDDEN, "k_proj": 64, "v_proj": 64, "o_proj": HIDDEN}
    weights = {}
    for layer in range(LAYERS):
        for name, out in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) * 0.3
            weights[f"{at}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "task_type": "CAUSAL_LM"}))
    return folder


def said(llm: Any, adapter: Path) -> list[list[int]]:
    """The same long prompt to the model and to the adapter, twice, so that each finds its own blocks in the cache."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompt = torch.randint(0, 512, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    request = LoRARequest("random", 1, str(adapter))
    found = []
    for lora in (None, request) * 2:  # in turn: on a CPU stock vLLM applies an adapter to the whole batch
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, lora_request=lora, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    return found


def test_adapters_give_the_stock_engines_tokens(model: Path, adapter: Path) -> None:
    options: dict[str, Any] = {"model": str(model), "max_model_len": 1024, "skip_tokenizer_init": True}
    options.update(enable_lora=True, max_lora_rank=RANK, max_loras=1)
    with engine(None, 32 * MIB, **options) as llm:
        stock = said(llm, adapter)
    with engine(PLAIN, 32 * MIB, 64, **options) as llm:
        found = said(llm, adapter)
        assert metric(llm, "vllm:prefix_cache_hits") == 2 * 256
    assert found == stock
    assert found[0] != found[1]
    assert found[2:] == found[:2]
