"""A model on `hisparse` attention with another cache, or none, computes what sdpa computes; and pipelines work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_tools import MODELS, VOCAB, cache_for, dense, greedy, left_padded, prompt, settings_of, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    PreTrainedTokenizerFast,
    StaticCache,
    pipeline,
)

from hisparse.integrations.transformers import register
from hisparse.integrations.transformers.attention import NAME, hisparse_attention


def both(model: Any, run: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`run()` on hisparse attention, and on sdpa."""
    results = []
    for name in ("hisparse", "sdpa"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            results.append(run())
    return results[0], results[1]


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("padded", [False, True])
def test_a_dynamic_cache_in_chunks(kind: str, padded: bool) -> None:
    model = tiny(kind)
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in ((31, 70) if padded else (70, 70))])

    def run() -> torch.Tensor:
        cache, out, done = DynamicCache(config=model.config), [], 0
        for piece in ids.split([40, 1, 9, 20], 1):
            done += piece.shape[1]
            out.append(model(piece, past_key_values=cache, attention_mask=mask[:, :done]).logits)
        return torch.cat(out, 1)[mask.bool()]

    found, want = both(model, run)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", list(MODELS))
def test_no_cache_and_generation(kind: str) -> None:
    model = tiny(kind)
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in (20, 50)])
    found, want = both(model, lambda: model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()])
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    assert torch.equal(*both(model, lambda: greedy(model, ids, None, attention_mask=mask)))
    assert torch.equal(*both(model, lambda: greedy(model, prompt(30), None, num_beams=3)))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_static_cache(kind: str) -> None:
    """Longer than what it holds: an absent mask would mean another diagonal."""
    model = tiny(kind)

    def run() -> torch.Tensor:
        cache = StaticCache(config=model.config, max_cache_len=90)
        out = [model(piece, past_key_values=cache).logits for piece in prompt(70).split([40, 1, 9, 20], 1)]
        return torch.cat(out, 1)

    found, want = both(model, run)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


def test_a_mask_that_is_too_short_is_filled_up_as_sdpa_does() -> None:
    model = tiny()

    def run() -> torch.Tensor:
        cache = DynamicCache()
        model(prompt(20), past_key_values=cache)
        out: torch.Tensor = model(prompt(5), past_key_values=cache, attention_mask=torch.ones(1, 20)).logits
        return out

    found, want = both(model, run)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


def test_cross_attention_is_not_made_causal() -> None:
    torch.manual_seed(0)
    sizes = {
        f"{part}_{what}": n
        for part in ("encoder", "decoder")
        for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
    }
    model = BartForConditionalGeneration(BartConfig(vocab_size=VOCAB, d_model=32, **sizes)).eval()
    found, want = both(model, lambda: model(prompt(30), decoder_input_ids=prompt(8, seed=1)).logits)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_gradients_flow_in_training() -> None:
    grads = []
    for name in ("hisparse", "sdpa"):
        model = tiny(attention=name)
        model(prompt(30), labels=prompt(30)).loss.backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-5)


def test_registering_twice_changes_nothing() -> None:
    register()
    assert AttentionInterface._global_mapping[NAME] is hisparse_attention


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(WordLevel({word(i): i for i in range(VOCAB)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", padding_side="left")


def word(i: int) -> str:
    return {0: "<pad>", 1: "<unk>"}.get(i, f"w{i}")


def words(length: int, seed: int = 0) -> str:
    return " ".join(word(i) for i in prompt(length, seed=seed)[0].tolist())


def test_text_generation_pipeline(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny()
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    arguments = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    cache = cache_for(model)
    (out,) = generate(words(60), past_key_values=cache, **arguments)
    assert cache.get_seq_length() == 71
    want = dense(model, prompt(60), 12)[0, 60:]
    assert out["generated_text"].split() == [word(i) for i in want.tolist()]


def test_pipeline_with_a_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny()
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    arguments = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False, "batch_size": 2}
    texts = [words(30, 1), words(55, 2)]
    found = generate(texts, past_key_values=cache_for(model), **arguments)
    for (out,), length, seed in zip(found, (30, 55), (1, 2), strict=True):
        want = dense(model, prompt(length, seed=seed), 12)[0, length:]
        assert out["generated_text"].split() == [word(i) for i in want.tolist()]


@pytest.mark.parametrize("config", [settings_of(), settings_of(evict="drop")], ids=["host", "drop"])
def test_several_samples_of_one_prompt(config: Any) -> None:
    model = tiny()
    cache = cache_for(model, config)
    torch.manual_seed(3)
    out = greedy(model, prompt(100), cache, do_sample=True, num_return_sequences=2, temperature=1.5)
    assert out.shape == (2, 124)
    assert not torch.equal(out[0], out[1])
    assert len(cache.planners) == 2
    cache.check_integrity()
