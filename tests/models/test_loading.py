"""`load_model`: directories and hub ids, and the embedded default model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hisparse import books
from hisparse.errors import InputError, ModelError
from hisparse.models import context_window, load_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, max_position_embeddings=77, **size))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, torch.float32), ("auto", torch.bfloat16), (torch.float16, torch.float16)]
)
def test_a_directory_is_loaded_in_the_dtype_asked_for(directory: Path, dtype: Any, expected: torch.dtype) -> None:
    model, tokenizer = load_model(str(directory), dtype)
    assert model.dtype == expected
    assert not model.training
    assert context_window(model) == 77
    assert tokenizer("a").input_ids == [0]


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("victim", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_directory_is_named(directory: Path, victim: str) -> None:
    path = directory / victim
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ModelError, match=f"cannot be loaded from {directory}"):
        load_model(str(directory))


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "a/b/c", " ", "", "nowhere.gguf"])
def test_a_path_that_does_not_exist_never_reaches_the_hub(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("hisparse.models.load._from_pretrained", None)
    with pytest.raises(ModelError, match=r"no such (file|directory)|empty"):
        load_model(name)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        load_model(str(path))


def test_a_hub_id_offline_says_so_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"nobody/nothing.*HF_HUB_OFFLINE is set.*default model"):
        load_model("nobody/nothing")


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    with pytest.raises(ModelError, match=r"no route to host.*check the spelling and the connection"):
        load_model("nobody/nothing")


def test_the_real_book_is_fetched_and_whole() -> None:
    text = books.book()
    assert text.startswith("HAMLET, PRINCE OF DENMARK")
    assert len(text) == 173942
    assert "To be, or not to be,--that is the question" in text


@pytest.mark.real_model
def test_the_default_model_answers_through_its_chat_template(default_model: tuple[Any, Any]) -> None:
    model, tokenizer = default_model
    assert model.dtype == torch.float32
    assert context_window(model) == 8192
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=24, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(out, skip_special_tokens=True)
    assert out[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.real_model
def test_the_default_models_weights_are_those_of_its_file(default_model: tuple[Any, Any]) -> None:
    import gguf

    from hisparse.models import default_gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(default_gguf())).tensors}
    for name, ours in (
        ("token_embd.weight", default_model[0].model.embed_tokens.weight),
        ("blk.7.ffn_down.weight", default_model[0].model.layers[7].mlp.down_proj.weight),
    ):
        stored = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert torch.equal(torch.from_numpy(stored), ours.detach())


@pytest.mark.real_model
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(20, 400))
def test_the_opening_of_a_text_fits_and_ends_with_a_line(default_model: tuple[Any, Any], tokens: int) -> None:
    tokenizer, text = default_model[1], books.book()[:4000]
    start = books.opening(text, tokenizer, tokens)
    assert text.startswith(start)
    assert start.endswith("\n")
    assert len(tokenizer(start, add_special_tokens=False).input_ids) <= tokens
    longer = text[: text.index("\n", len(start)) + 1]
    assert len(tokenizer(longer, add_special_tokens=False).input_ids) >= tokens - 1


@pytest.mark.real_model
def test_the_opening_of_a_short_text_is_all_of_it(default_model: tuple[Any, Any]) -> None:
    assert books.opening("no line break", default_model[1], 100) == "no line break"
    with pytest.raises(InputError, match="first line"):
        books.opening("one line that is longer than that", default_model[1], 2)
