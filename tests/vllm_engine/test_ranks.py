"""Two tensor-parallel ranks give the tokens of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine_tools import MIB, engine, generate

# Everything is kept, in five bits: what a rank sets aside depends on its heads, and so may its tokens.
KEPT: dict[str, Any] = {"evict": "none", "tlif": {"prefix_length": 24}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose heads two ranks can share; random weights, sharp enough that its tokens differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def test_two_ranks_give_the_tokens_of_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 512, (length,), generator=generator).tolist() for length in (5, 100, 500)]
    options: dict[str, Any] = {
        "model": str(model),
        "max_model_len": 1024,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    found = []
    for ranks in (1, 2):
        with engine(KEPT, 32 * MIB, 64, tensor_parallel_size=ranks, **options) as llm:
            found.append(generate(llm, prompts, 80, detokenize=False))
    assert found[1] == found[0]
    assert len({tuple(tokens) for (tokens,) in found[0]}) == 3
    assert all(len(set(tokens)) > 10 for (tokens,) in found[0])
