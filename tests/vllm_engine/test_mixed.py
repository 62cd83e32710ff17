"""Models of which some layers have a sliding window: those keep the stock backend, HiSparse holds the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine_tools import MIB, RAW, SIZES, engine, generate, runtime, save_random

from hisparse.errors import UnsupportedError

PER_KIND = {"backend_per_kind": {"full_attention": "CUSTOM"}}
PLAIN = {**RAW, "tlif": {"prefix_length": 24}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Gemma 3, every third layer of which sees everything; random weights."""
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=6,
        query_pre_attn_scalar=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return save_random(config, tmp_path_factory.mktemp("model"))


def options(model: Path, **more: Any) -> dict[str, Any]:
    fixed = {"max_model_len": 2048, "skip_tokenizer_init": True, "disable_log_stats": True, "block_size": 32}
    return {"model": str(model), **fixed, **more}


def said(llm: Any) -> list[list[list[int]]]:
    """Short and long prompts together, then one that finds its beginning in the prefix cache."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in (5, 100, 900)]
    some = generate(llm, prompts, 80, detokenize=False)
    return some + generate(llm, [prompts[2] + prompts[1]], 20, detokenize=False)


def test_layers_with_a_window_keep_their_backend(model: Path) -> None:
    with engine(None, 64 * MIB, **options(model)) as llm:
        stock = said(llm)
    with engine(PLAIN, 64 * MIB, 64, **options(model, attention_backend=None, attention_config=PER_KIND)) as llm:
        found = said(llm)
        assert runtime().model_layers == [2, 5]
    assert found == stock
    assert len({token for (tokens,) in found for token in tokens}) > 10


def test_packed_layers_beside_layers_with_a_window(model: Path) -> None:
    """With recall, in blocks that are larger than those of the stock backend."""
    mixed = options(model, attention_backend=None, attention_config=PER_KIND)
    with engine({"tlif": {"prefix_length": 24}}, 64 * MIB, 768, **mixed) as llm:
        found = said(llm)
        assert runtime().statistics()["recalled_rows"] > 0
    assert [len(tokens) for (tokens,) in found] == [80, 80, 80, 20]


@pytest.mark.parametrize(
    ("more", "words"),
    [({}, "backend_per_kind"), ({"attention_backend": None, "attention_config": PER_KIND}, "smaller --block-size")],
    ids=["no backend for them", "their blocks too large"],
)
def test_what_does_not_fit_together_is_refused(model: Path, more: dict[str, Any], words: str) -> None:
    with (
        pytest.raises(UnsupportedError, match=words),
        engine(PLAIN, 64 * MIB, 64, **options(model, block_size=128, **more)),
    ):
        pass
