"""Labels against formulas computed from the model's own hidden states and attention weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tlif_tools import CONFIGS, tiny
from transformers import DynamicCache, PreTrainedModel

from hisparse.errors import ModelError
from hisparse.tlif.labels import attention_modules, label_window, layer0_values, remove_position_decay, tail_margin

GAP = 8


def ids(tokens: int) -> torch.Tensor:
    return torch.randint(2, 300, (tokens,), generator=torch.Generator().manual_seed(tokens))


def hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("name", CONFIGS)
def test_key_distinctiveness_agrees_with_keys_computed_from_hidden_states(name: str) -> None:
    model, tokens = tiny(name), ids(63)
    before = hooks(model)
    found = label_window(model, tokens, "key_distinctiveness", GAP)
    assert hooks(model) == before
    with torch.no_grad():
        states = model.model(tokens.unsqueeze(0), output_hidden_states=True, use_cache=False).hidden_states
    total = np.zeros(63)
    layers = [1, 2] if name == "gemma3" else [0, 1, 2]
    for index in layers:
        layer = model.model.layers[index]
        with torch.no_grad():
            keys = layer.self_attn.k_proj(layer.input_layernorm(states[index][0])).view(63, 2, -1)
            if hasattr(layer.self_attn, "k_norm"):
                keys = layer.self_attn.k_norm(keys)
        unit = keys.double().numpy()
        unit = unit / np.linalg.norm(unit, axis=-1, keepdims=True)
        mean = unit.mean(0)
        cosine = (unit * mean).sum(-1) / np.linalg.norm(mean, axis=-1)
        total += (1 - cosine).mean(1)
    np.testing.assert_allclose(found.numpy(), total / len(layers), atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("label", ["received_attention", "received_attention_mean"])
def test_received_attention_agrees_with_the_models_weights(name: str, label: str) -> None:
    model, tokens = tiny(name), ids(63)
    implementation = model.config._attn_implementation
    found = label_window(model, tokens, label, GAP).numpy()
    assert model.config._attn_implementation == implementation
    assert not hooks(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(tokens.unsqueeze(0), output_attentions=True, use_cache=False).attentions
    full = [1, 2] if name == "gemma3" else [0, 1, 2]
    expected = np.full(63, np.nan)
    for key in range(63 - 2 * GAP):
        later = np.stack([weights[layer][0, :, key + GAP :, key].double().numpy() for layer in full])
        received = later.mean(-1) if label.endswith("mean") else later.max(-1)
        expected[key] = np.log(received.mean())
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert int(np.isnan(found).sum()) == tail_margin(label, GAP)


@pytest.mark.parametrize("name", CONFIGS)
def test_layer0_values_are_what_a_cache_is_handed(name: str) -> None:
    model, tokens = tiny(name), ids(31)
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens.unsqueeze(0), past_key_values=cache)
    expected = cache.layers[0].values[0].transpose(0, 1).reshape(31, -1)
    torch.testing.assert_close(layer0_values(model, tokens), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_layer0_values_know_neither_position_nor_context(name: str) -> None:
    model, tokens = tiny(name), ids(63)
    values = layer0_values(model, tokens)
    torch.testing.assert_close(layer0_values(model, tokens.flip(0)).flip(0), values)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel: no attention module with a key projection"):
        label_window(tiny("gpt2"), ids(31), "key_distinctiveness", GAP)


def test_a_failed_forward_pass_leaves_no_hooks() -> None:
    model = tiny("llama")
    with pytest.raises(IndexError):
        label_window(model, torch.tensor([5, 6, 10_000]), "key_distinctiveness", GAP)
    assert not hooks(model)


def test_sliding_layers_are_not_labelled() -> None:
    assert [module.layer_idx for module in attention_modules(tiny("gemma3"))] == [1, 2]


def test_position_decay_is_removed_and_unlabelled_tokens_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(200, 123, generator=generator)
    labels = noise - 0.05 * torch.arange(123.0)
    labels[:, 100:] = torch.nan
    corrected = remove_position_decay(labels, labels, width=5)
    assert corrected[:, 100:].isnan().all()
    torch.testing.assert_close(corrected[:, 3:97].mean(0), torch.zeros(94), atol=0.2, rtol=0)
    assert not corrected[:, :100].isnan().any()
