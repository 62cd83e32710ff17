"""LoRA adapters are vLLM's own business: they change projections, and what HiSparse holds follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine_tools import MIB, RAW, SMALL, engine, metric

from hisparse.models.load import default_directory

RANK = 8
GPU = torch.cuda.is_available()
SAME = 1 if GPU else 24
"""Tokens that have to be the same: on a GPU vLLM's adapters take 16 bits alone, which two attentions round unlike."""
PLAIN = {**RAW, "tlif": {"prefix_length": 24}}


@pytest.fixture(params=["small", "default"])
def model(request: pytest.FixtureRequest, small_model: Path) -> Path:
    """A small Llama with random weights, and the default model."""
    return small_model if request.param == "small" else Path(default_directory())


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    """A random adapter of all projections of the attention, as PEFT writes it."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    of = AutoConfig.from_pretrained(model)
    generator = torch.Generator().manual_seed(1)
    head = of.hidden_size // of.num_attention_heads
    kv = of.num_key_value_heads * head
    sizes = {"q_proj": of.hidden_size, "k_proj": kv, "v_proj": kv, "o_proj": of.hidden_size}
    scale = 3.4 / of.hidden_size**0.5
    weights = {}
    for layer in range(of.num_hidden_layers):
        for name, out in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, of.hidden_size, generator=generator) * scale
            weights[f"{at}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * scale
    save_file(weights, tmp_path / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(sizes)}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "task_type": "CAUSAL_LM"}))
    return tmp_path


def said(llm: Any, adapter: Path) -> list[list[int]]:
    """The same long prompt to the model and to the adapter, twice, so that each finds its own blocks in the cache."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompt = torch.randint(0, 512, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    request = LoRARequest("random", 1, str(adapter))
    found = []
    for lora in (None, request) * 2:  # in turn: on a CPU stock vLLM applies an adapter to the whole batch
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, lora_request=lora, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    return found


def test_adapters_give_the_stock_engines_tokens(model: Path, adapter: Path) -> None:
    options: dict[str, Any] = {"model": str(model), **SMALL}
    options.update(enable_lora=True, max_lora_rank=RANK, max_loras=1, dtype="bfloat16" if GPU else "float32")
    with engine(None, 128 * MIB, **options) as llm:
        stock = said(llm, adapter)
    with engine(PLAIN, 128 * MIB, 64, **options) as llm:
        found = said(llm, adapter)
        assert metric(llm, "vllm:prefix_cache_hits") == 2 * 256
    begun = [tokens[:SAME] for tokens in found]
    assert begun == [tokens[:SAME] for tokens in stock]
    assert found[0] != found[1]
    assert begun[2:] == begun[:2]
