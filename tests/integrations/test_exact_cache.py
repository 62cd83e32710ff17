"""With everything kept in the model's dtype a HiSparse cache says what the stock cache says, token for token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tools import MODELS, RAW, cache_for, dense, greedy, left_padded, prompt, settings_of, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import set_seed


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


def test_models_are_worth_comparing(model: Any) -> None:
    """Their answers vary, and depend on the far past: else the tests below would prove nothing."""
    ids = prompt(120)
    tokens = dense(model, ids)[0, 120:]
    assert len(set(tokens.tolist())) > 5
    other = ids.clone()
    other[0, 20:30] = prompt(10, seed=9)
    assert not torch.equal(dense(model, other)[0, 120:], tokens)


def test_one_piece_of_prefill(model: Any) -> None:
    ids, cache = prompt(150), cache_for(model)
    assert torch.equal(greedy(model, ids, cache, 40), dense(model, ids, 40))
    assert cache.get_seq_length() == 189
    assert "189 tokens = " in cache.check_integrity()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_in_chunks(model: Any, chunk: int) -> None:
    ids, cache = prompt(90), cache_for(model)
    assert torch.equal(greedy(model, ids, cache, prefill_chunk_size=chunk), dense(model, ids))
    cache.check_integrity()


def test_left_padded_batch(model: Any) -> None:
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in (60, 110, 21)])
    cache = cache_for(model)
    found = greedy(model, ids, cache, attention_mask=mask)
    assert torch.equal(found, dense(model, ids, attention_mask=mask))
    assert [p.sequence.length for p in cache.planners] == [n + 23 for n in (60, 110, 21)]
    cache.check_integrity()


def test_left_padded_batch_in_chunks(model: Any) -> None:
    """Whole chunks of padding for the short sequences."""
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in (5, 90)])
    found = greedy(model, ids, cache_for(model), attention_mask=mask, prefill_chunk_size=16)
    assert torch.equal(found, dense(model, ids, attention_mask=mask))


def test_second_turn_on_the_same_cache(model: Any) -> None:
    cache, first = cache_for(model), prompt(100)
    answer = greedy(model, first, cache, 20)
    second = torch.cat([answer, prompt(30, seed=5)], 1)
    assert torch.equal(greedy(model, second, cache, 20), dense(model, second, 20))
    third = torch.cat([greedy(model, second, cache_for(model), 20), prompt(1, seed=6)], 1)
    assert torch.equal(greedy(model, third, cache, 20), dense(model, third, 20))
    cache.check_integrity()


def test_second_turn_of_a_padded_batch(model: Any) -> None:
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in (33, 70)])
    cache = cache_for(model)
    answer = greedy(model, ids, cache, 10, attention_mask=mask)
    second = torch.cat([answer, prompt(20, 2, seed=7)], 1)
    wide = torch.nn.functional.pad(mask, (0, second.shape[1] - mask.shape[1]), value=1)
    found = greedy(model, second, cache, 10, attention_mask=wide)
    assert torch.equal(found, dense(model, second, 10, attention_mask=wide))


def test_sampling_with_a_seed(model: Any) -> None:
    ids, sample = prompt(80), {"do_sample": True, "temperature": 1.3, "top_k": 20, "num_return_sequences": 2}
    set_seed(11)
    found = greedy(model, ids, cache_for(model), **sample)
    set_seed(11)
    want = dense(model, ids, **sample)
    assert torch.equal(found, want)
    assert not torch.equal(found[0], found[1])


@settings(max_examples=12, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    kind=st.sampled_from(["llama", "gemma3_text", "glm4"]),
    seed=st.integers(0, 1000),
)
def test_any_pieces_give_the_logits_of_one(cuts: list[int], kind: str, seed: int) -> None:
    model, ids = tiny(kind), prompt(sum(cuts), seed=seed)
    cache, pieces = cache_for(model), []
    with torch.no_grad():
        for piece in ids.split(cuts, 1):
            pieces.append(model(piece, past_key_values=cache).logits)
        model.set_attn_implementation("sdpa")
        want = model(ids).logits
    torch.testing.assert_close(torch.cat(pieces, 1), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "config", [RAW, settings_of(selection={"min_tokens": 24, "root_factor": 0.0})], ids=["raw", "packed"]
)
def test_each_sequence_of_a_batch_gives_what_it_gives_alone(config: Any) -> None:
    model, lengths = tiny(), (40, 130, 77)
    texts = [prompt(n, seed=n)[0] for n in lengths]
    ids, mask = left_padded(texts)
    calibrated = cache_for(model, config)  # statistics are estimated from the first tokens packed: give all the same
    greedy(model, texts[1][None], calibrated)
    stats = [store.stats for store in calibrated.stores]

    def run(ids: torch.Tensor, **extra: Any) -> tuple[torch.Tensor, Any]:
        cache = cache_for(model, config)
        for layer, s in zip(cache.layers, stats, strict=True):
            layer.stats = s  # type: ignore[attr-defined]
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=20, do_sample=False, output_logits=True,
            return_dict_in_generate=True, **extra,
        )  # fmt: skip
        return torch.stack(out.logits, 1), cache

    together, cache = run(ids, attention_mask=mask)
    for row, text in enumerate(texts):
        alone, single = run(text[None])
        torch.testing.assert_close(together[row], alone[0], rtol=1e-3, atol=1e-3)
        for mine, theirs in zip(
            cache.planners[row].sequence.positions(), single.planners[0].sequence.positions(), strict=True
        ):
            assert mine.tolist() == theirs.tolist()
    cache.check_integrity()


def test_forks_are_independent() -> None:
    for config in (RAW, settings_of(selection={"min_tokens": 24, "root_factor": 0.0})):
        model, ids = tiny("gemma3_text"), prompt(90)
        cache = cache_for(model, config)
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache)
        fork = copy.deepcopy(cache)
        other = torch.cat([ids, prompt(40, seed=3)], 1)
        forked = greedy(model, other, fork, 30)
        plain = greedy(model, ids, cache, 30)
        for tokens, want in ((forked, other), (plain, ids)):
            fresh = cache_for(model, config)
            with torch.no_grad():
                model(ids[:, :-1], past_key_values=fresh)
            assert torch.equal(tokens, greedy(model, want, fresh, 30))
        assert "119 tokens" in cache.check_integrity()
        assert "159 tokens" in fork.check_integrity()


def test_a_cache_saved_to_a_file_goes_on_where_it_was(tmp_path: Path) -> None:
    model, ids, config = tiny("gemma3_text"), prompt(120), settings_of(selection={"min_tokens": 24, "root_factor": 0.0})
    cache = cache_for(model, config)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    torch.save(cache, tmp_path / "cache.pt")
    read = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert torch.equal(greedy(model, ids, read), greedy(model, ids, cache))
    assert read.check_integrity() == cache.check_integrity()


def test_inference_mode_may_come_and_go() -> None:
    model, pieces = tiny(), prompt(300).split([80, 30, 1, 100, 1, 88], 1)
    outputs = []
    for modes in (["no"] * 6, ["inference", "no"] * 3, ["inference", "grad"] * 3, ["grad", "inference"] * 3):
        cache = cache_for(model, settings_of(selection={"min_tokens": 24, "root_factor": 0.0}))
        logits = []
        for mode, piece in zip(modes, pieces, strict=True):
            with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "grad"):
                logits.append(model(piece, past_key_values=cache).logits.detach().clone())
        outputs.append(torch.cat(logits, 1))
        cache.check_integrity()
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-3, atol=1e-3)


def test_embeddings_in_place_of_tokens() -> None:
    model, ids = tiny(), prompt(90)
    embeds, mask = model.get_input_embeddings()(ids), torch.ones_like(ids)
    out = model.generate(
        inputs_embeds=embeds, attention_mask=mask, past_key_values=cache_for(model), max_new_tokens=9, do_sample=False
    )
    assert torch.equal(out, dense(model, ids, 9)[:, 90:])


def test_right_padding_of_a_forward_pass() -> None:
    model, ids = tiny(), prompt(80, 2)
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[0, 50:] = 0
    cache = cache_for(model)
    with torch.no_grad():
        found = model(ids, attention_mask=mask, past_key_values=cache).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(found[0, :50], model(ids[:1, :50]).logits[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[1], model(ids[1:]).logits[0], rtol=1e-3, atol=1e-3)
    assert [p.sequence.length for p in cache.planners] == [50, 80]


def test_reset_gives_a_fresh_cache() -> None:
    for kind in ("llama", "gemma3_text"):
        model, ids = tiny(kind), prompt(80)
        cache = cache_for(model, settings_of())
        first = greedy(model, ids, cache)
        report = cache.report()
        greedy(model, torch.cat([first, prompt(9)], 1), cache)
        cache.reset()
        assert cache.report().gpu_bytes == cache.report().host_bytes == 0
        assert cache.get_seq_length() == 0
        assert torch.equal(greedy(model, ids, cache), first)
        assert cache.report() == report
        cache.reset()
        two = prompt(50, 2)  # another batch size
        assert greedy(model, two, cache).shape == (2, 74)
        cache.check_integrity()


def test_gradients_reach_the_chunk_and_not_the_cache() -> None:
    model = tiny()
    cache = cache_for(model, settings_of(selection={"min_tokens": 8, "root_factor": 0.0}))
    with torch.no_grad():
        free = cache_for(model, settings_of(selection={"min_tokens": 8, "root_factor": 0.0}))
        want = [model(p, past_key_values=free).logits for p in prompt(120).split([90, 20, 10], 1)]
    for piece, logits in zip(prompt(120).split([90, 20, 10], 1), want, strict=True):
        out = model(piece, past_key_values=cache).logits
        torch.testing.assert_close(out, logits, rtol=1e-4, atol=1e-4)
        assert not cache.stores[0].dense_k.requires_grad
        out.sum().backward()
    assert model.model.layers[0].self_attn.v_proj.weight.grad.abs().sum() > 0
