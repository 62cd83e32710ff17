"""A byte-level tokenizer, a tiny model, a stand-in that looks up what its cache remembers, and faulty caches."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hisparse.evaluate.caches import DenseCaches

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Every byte is a token, id 0 to 255 in the order of the byte-level alphabet; "<eos>" is 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", chat_template=template)


def tiny_llama(seed: int = 0) -> Any:
    """Two layers of random weights, 257 tokens, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=257,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def prose(sentences: int = 400) -> str:
    words = ["the", "river", "ran", "under", "an", "old", "bridge", "while", "nobody", "looked", "at", "it"]
    lines = [
        f"Line {i} says that {' '.join(words[(i * 7 + j * 5) % len(words)] for j in range(4 + i % 9))}."
        for i in range(sentences)
    ]
    return "\n\n".join(" ".join(lines[i : i + 5]) for i in range(0, sentences, 5))


class Lookup:
    """Stands for a model that retrieves perfectly from whatever its cache (a list of token ids) still holds."""

    device = torch.device("cpu")
    generation_config = SimpleNamespace(eos_token_id=256)

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.prefilled = 0  # tokens seen in pieces longer than one: what sharing a prefill saves

    def __call__(self, input_ids: torch.Tensor, past_key_values: list[int], **_: Any) -> Any:
        past_key_values.extend(input_ids[0].tolist())
        if input_ids.shape[1] > 1:
            self.prefilled += input_ids.shape[1]
        text = self.tokenizer.decode(past_key_values)
        begun = re.search(r"<\|assistant\|>(\w+) =(.*)$", text, re.S)
        letter = "?"
        if begun:
            facts = re.findall(rf"Note this: {begun[1]} = (\d+)\.", text)
            letter = (f" {facts[0]}" if facts else " unknown").ljust(40, "\n")[len(begun[2])]
        logits = torch.zeros(1, 1, 257)
        logits[0, 0, self.tokenizer(letter).input_ids[0]] = 1
        return SimpleNamespace(logits=logits)


class Lists:
    """Caches for :class:`Lookup`. With `forget`, the first so many tokens are gone once the document is stored."""

    def __init__(self, name: str, forget: int = 0) -> None:
        self.name, self.forget = name, forget

    def use(self, model: Any) -> None: ...

    def new(self, model: Any) -> list[int]:
        return []

    def fork(self, cache: list[int]) -> list[int]:
        return copy.copy(cache)

    def report(self, cache: list[int]) -> dict[str, Any]:
        del cache[: self.forget]  # called once a context, between document and questions
        return {"dense_bytes": 1, "gpu_bytes": 1, "host_bytes": 0, "capacity": 1.0}


class _Blurred(DynamicCache):
    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key, value + 2 * value.roll(1, dims=-1), *args, **kwargs)


class BlurredCaches(DenseCaches):
    """Values are damaged as they are stored."""

    name = "blurred"

    def new(self, model: Any) -> Any:
        self.use(model)
        return _Blurred(config=model.config)
