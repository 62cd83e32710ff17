"""What a HiSparse cache cannot do it refuses, by name and with the remedy; the cache stays usable, or says that not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_tools import RAW, cache_for, dense, greedy, prompt, settings_of, tiny

from hisparse.errors import ConfigError, FormatError, InputError, UnsupportedError
from hisparse.integrations.transformers import HiSparseCache
from hisparse.integrations.transformers.cache import HiSparseLayer

KINDS = ["llama", "gemma3_text"]  # the second begins with a sliding-window layer


def filled(model: Any, length: int = 60) -> HiSparseCache:
    cache = cache_for(model)
    with torch.no_grad():
        model(prompt(length), past_key_values=cache)
    return cache


def goes_on(model: Any, cache: HiSparseCache, length: int = 60) -> None:
    """The cache still continues the prompt that it was filled with."""
    ids = torch.cat([prompt(length), prompt(4, seed=8)], 1)
    assert torch.equal(greedy(model, ids, cache, 12), dense(model, ids, 12))
    cache.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_beam_search(kind: str) -> None:
    model = tiny(kind)
    with pytest.raises(UnsupportedError, match=r"beam search: .* use num_beams=1"):
        greedy(model, prompt(40), cache_for(model), num_beams=2)


@pytest.mark.parametrize("kind", KINDS)
def test_assisted_decoding(kind: str) -> None:
    model = tiny(kind)
    for extra in ({"assistant_model": tiny("llama", attention="sdpa")}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(UnsupportedError, match=r"assisted decoding .* generate without assistant_model"):
            greedy(model, prompt(40), cache_for(model), **extra)


@pytest.mark.parametrize("kind", KINDS)
def test_undoing_and_rearranging_leave_the_cache_as_it_was(kind: str) -> None:
    model = tiny(kind)
    cache = filled(model)
    for call, message in (
        (lambda: cache.crop(-3), r"crop\(-3\): .* reset\(\), or copy.deepcopy"),
        (lambda: cache.crop(10), r"crop\(10\): .* reset\(\), or copy.deepcopy"),
        (lambda: cache.reorder_cache(torch.tensor([0])), "use num_beams=1"),
        (lambda: cache.batch_repeat_interleave(2), "repeat the inputs before the prefill"),
        (lambda: cache.batch_select_indices(torch.tensor([0])), "one cache a sequence"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            call()
    assert not getattr(cache, "is_croppable", False)  # transformers asks from 5.17 on
    goes_on(model, cache)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_is_not_on_hisparse_attention(attention: str) -> None:
    with pytest.raises(
        UnsupportedError, match=rf'"{attention}"; call model.set_attn_implementation\("hisparse"\) first'
    ):
        cache_for(tiny(attention=attention))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [False, True])
def test_a_model_switched_back_is_refused_at_once(kind: str, copied: bool) -> None:
    model = tiny(kind)
    cache = filled(model)
    cache = copy.deepcopy(cache) if copied else cache
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r'now uses attention "sdpa".*set_attn_implementation'):
        model(prompt(1), past_key_values=cache)
    model.set_attn_implementation("hisparse")
    goes_on(model, cache)


def bad_passes() -> list[tuple[dict[str, Any], type[Exception], str]]:
    ones = torch.ones
    hole = ones(1, 63, dtype=torch.long)
    hole[0, 7] = 0
    return [
        ({"attention_mask": ones(1, 3)}, InputError, "3 columns, but 60 tokens are cached and 3 are new; pass all 63"),
        ({"attention_mask": ones(1, 70)}, InputError, r"has 70 columns, .* pass all 63"),
        ({"attention_mask": hole}, InputError, "59 cached tokens of sequence 0, but the cache holds 60; pass the mask"),
        ({"input_ids": prompt(3, 2)}, InputError, "2 sequences, but this cache holds 1; use a new cache or call reset"),
        ({"output_attentions": True}, UnsupportedError, "output_attentions: .* use the stock cache"),
        ({"attention_mask": ones(1, 1, 3, 63, dtype=torch.bool)}, UnsupportedError, r"mask of shape \(1, 1, 3, 63\)"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(6))
def test_passes_that_would_go_wrong(number: int) -> None:
    model = tiny()
    cache = filled(model)
    arguments, error, message = bad_passes()[number]
    with torch.no_grad(), pytest.raises(error, match=message):
        model(**{"input_ids": prompt(3), "past_key_values": cache, **arguments})
    goes_on(model, cache)


@pytest.mark.parametrize("number", range(6))
def test_after_sliding_layers_went_ahead_the_cache_asks_for_a_reset(number: int) -> None:
    model = tiny("gemma3_text")
    cache = filled(model)
    arguments, error, message = bad_passes()[number]
    mask = arguments.get("attention_mask")
    if mask is not None and mask.ndim == 4:
        arguments = {"attention_mask": {"full_attention": mask, "sliding_attention": mask[..., -26:]}}
    with torch.no_grad(), pytest.raises(error, match=message):
        model(**{"input_ids": prompt(3), "past_key_values": cache, **arguments})
    if "input_ids" in arguments:  # refused before anything changed
        goes_on(model, cache)
        return
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"stopped half-way.* reset\(\) it"):
        model(prompt(3), past_key_values=cache)
    cache.reset()
    ids = prompt(50)
    assert torch.equal(greedy(model, ids, cache), dense(model, ids))


@pytest.mark.parametrize("kind", [*KINDS, "qwen3"])
def test_a_pass_that_stopped_half_way_is_never_built_upon(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in any layer: the next pass is refused, not computed from layers that hold different tokens."""
    layers = tiny(kind).config.num_hidden_layers
    for stop_at in range(layers):
        model = tiny(kind)
        cache = filled(model)
        broken = model.model.layers[stop_at].mlp
        hook = broken.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(prompt(5), past_key_values=cache)
        hook.remove()
        whole = stop_at == layers - 1  # every layer had stored the chunk
        with torch.no_grad():
            if whole:
                model(prompt(2), past_key_values=cache)
            else:
                with pytest.raises(UnsupportedError, match=r"reset\(\) it"):
                    model(prompt(2), past_key_values=cache)
                with pytest.raises(UnsupportedError, match=r"reset\(\)"):
                    model(prompt(2), past_key_values=cache)
        cache.reset()
        ids = prompt(50)
        assert torch.equal(greedy(model, ids, cache), dense(model, ids))


def test_values_that_cannot_be_packed_are_refused_and_not_built_upon() -> None:
    model = tiny()
    cache = filled(model)
    model.model.layers[1].self_attn.v_proj.weight.data[3, 5] = float("nan")
    with torch.no_grad():
        with pytest.raises(FormatError, match="nan; only finite"):
            model(prompt(60), past_key_values=cache)
        with pytest.raises(UnsupportedError, match=r"reset\(\) it"):
            model(prompt(60), past_key_values=cache)


DEEPSEEK = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    ("kind", "extra", "message"),
    [
        ("deepseek_v3", DEEPSEEK, r"latent vectors \(MLA\)"),
        ("minicpm3", {}, r"latent vectors \(MLA\)"),
        ("mamba", {}, "layers of kind linear_attention"),
        ("qwen3_next", {}, "layers of kind linear_attention"),
        ("falcon_h1", {}, "layers of kind hybrid"),
        ("llama4_text", {}, "layers of kind chunked_attention"),
        ("mistral", {"sliding_window": 16}, "every layer .* sliding window of 16 tokens: .* use the stock cache"),
        ("t5", {"is_decoder": False}, "encoder-decoder; .* use the stock cache"),
    ],
    ids=["deepseek", "minicpm3", "mamba", "qwen3-next", "falcon-h1", "llama4", "mistral with a window", "t5"],
)  # fmt: skip
def test_architectures_that_cannot_be_held(kind: str, extra: dict[str, Any], message: str) -> None:
    if kind == "t5":
        from transformers import T5Config, T5ForConditionalGeneration

        model: Any = T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=32, d_kv=16, d_ff=32, num_layers=1))
        model.config._attn_implementation = "hisparse"
    else:
        model = tiny(kind, **extra)
    with pytest.raises(UnsupportedError, match=message):
        cache_for(model)


@pytest.mark.parametrize(("kind", "argument"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_attention_with_other_scores(kind: str, argument: str) -> None:
    model = tiny(kind, layer_types=["full_attention"] * 2)
    with pytest.raises(UnsupportedError, match=f"passes {argument} to attention.*use the stock cache"):
        greedy(model, prompt(30), cache_for(model))


def test_configurations_that_do_not_fit_the_model() -> None:
    model = tiny()
    with pytest.raises(
        ConfigError, match="hidden_size = 2056, but the model's weights have 64; correct the configuration"
    ):
        cache_for(model, settings_of(hidden_size=2056))
    assert cache_for(model, settings_of(hidden_size=64)).config.hidden_size == 64
    with pytest.raises(FormatError, match=r"head_dim = 20 is not a multiple of 8.*enable_per_block_quant = false"):
        cache_for(tiny(head_dim=20), settings_of(evict="none"))
    with pytest.raises(FormatError, match=r"head_dim 24 .*use selection.sketch_bits = 2"):
        cache_for(tiny(head_dim=24), settings_of(selection={"sketch_bits": 1}))
    ids = prompt(60)
    for dim, config in ((24, settings_of(selection={"sketch_bits": 2})), (20, RAW)):
        odd = tiny(head_dim=dim)
        cache = cache_for(odd, config)
        assert greedy(odd, ids, cache).shape == (1, 84)
        cache.check_integrity()


def test_layers_of_other_shape_than_the_configuration() -> None:
    model = tiny()
    cache = cache_for(model)
    layer = cache.layers[0]
    assert isinstance(layer, HiSparseLayer)
    with pytest.raises(UnsupportedError, match="caches 3 heads of 16 channels where the configuration has 2 of 16"):
        layer.update(torch.zeros(1, 3, 5, 16), torch.zeros(1, 3, 5, 16))


def test_dropout_in_training() -> None:
    model = tiny(attention_dropout=0.1).train()
    with pytest.raises(UnsupportedError, match=r"dropout 0.1 .* model.eval\(\)"):
        model(prompt(5), past_key_values=cache_for(model))


def test_keys_that_never_reach_the_attention_function() -> None:
    model = tiny()
    layer = filled(model).layers[0]
    key = torch.zeros(1, 2, 1, 16)
    layer.update(key, key)
    with pytest.raises(UnsupportedError, match=r"never reached the `hisparse` attention .*reset\(\) the cache"):
        layer.update(key, key)
    for call in (layer.offload, layer.prefetch):
        with pytest.raises(UnsupportedError, match="HiSparse moves set-aside rows to the host itself"):
            call()


def test_a_model_without_companion_files_is_told_so() -> None:
    model = tiny()
    with pytest.warns(UserWarning, match="no calibration for this model"), pytest.warns(UserWarning, match="no TLIF"):
        HiSparseCache(model)


def test_a_dictionary_in_the_place_of_a_configuration() -> None:
    model = tiny("llama")
    with pytest.raises(ConfigError, match=r"config is a dict; pass HiSparseConfig\(\.\.\.\)"):
        HiSparseCache(model, {"evict": "none"})  # type: ignore[arg-type]
