"""A model of a few thousand weights with a byte tokenizer: the whole command line runs on it in a moment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hisparse.cli.main import run

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, so that a text has as many tokens wherever it is cut."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: i + 2 for i, letter in enumerate(letters)}}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str | None], PreTrainedTokenizerFast]:
    """From a chat template, or None, to a byte tokenizer."""
    return byte_tokenizer


@pytest.fixture(scope="session")
def chat() -> PreTrainedTokenizerFast:
    """A byte tokenizer with a chat template."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def plain() -> PreTrainedTokenizerFast:
    """A byte tokenizer without a chat template."""
    return byte_tokenizer(None)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama with random weights: 2 layers, 4 / 2 heads of 16, window 1024."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """600 bytes of text that does not repeat."""
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"{i * i % 997}" for i in range(400))[:600], encoding="utf-8")
    return path


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            run([str(argument) for argument in arguments])
        sys.stdout.flush()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call
