"""Tiny models of every architecture, and a tokenizer of characters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

COMMON = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=None),
    "glm4": lambda: Glm4Config(**COMMON, head_dim=16),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
}


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model of architecture `name`, float32, evaluation mode."""
    torch.manual_seed(seed)
    config = GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=300) if name == "gpt2" else CONFIGS[name]()
    return AutoModelForCausalLM.from_config(config).eval()


class Characters:
    """One token a character; id 1 begins a text."""

    bos_token_id = 1

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [2 + ord(character) % 250 for character in text]
