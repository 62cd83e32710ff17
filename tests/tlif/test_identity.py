"""Identity: the same model in other dtypes, and everything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tlif_tools import CONFIGS, tiny

from hisparse.errors import ModelError
from hisparse.identity import SAMPLES, ModelIdentity


@pytest.mark.parametrize("name", CONFIGS)
def test_dimensions_are_the_models(name: str) -> None:
    identity = ModelIdentity.of(tiny(name))
    assert (identity.hidden_size, identity.layers, identity.heads, identity.kv_heads) == (48, 3, 4, 2)
    assert identity.head_dim == (12 if name in ("llama", "qwen2", "mistral") else 16)
    assert identity.vocab_size == 300
    assert identity.value_features == 2 * identity.head_dim


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_is_the_same_model(dtype: torch.dtype) -> None:
    ModelIdentity.of(tiny("llama")).check(ModelIdentity.of(tiny("llama").to(dtype)), "file")


def test_four_bit_noise_is_the_same_model() -> None:
    model = tiny("llama")
    before = ModelIdentity.of(model)
    weight = model.get_input_embeddings().weight.data
    step = weight.abs().amax(1, keepdim=True) / 7
    weight.copy_((weight / step).round() * step)
    assert before.matches(ModelIdentity.of(model))


def test_other_weights_are_another_model() -> None:
    first, second = ModelIdentity.of(tiny("llama", 0)), ModelIdentity.of(tiny("llama", 1))
    with pytest.raises(ModelError, match=r"TLIF x belongs to another model.*other weights"):
        first.check(second, "TLIF x")


@pytest.mark.parametrize(
    "field", ["model_type", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "vocab_size"]
)
def test_each_differing_dimension_is_named_with_both_values(field: str) -> None:
    identity = ModelIdentity.of(tiny("llama"))
    other = replace(identity, **{field: "gpt" if field == "model_type" else 7777})
    with pytest.raises(
        ModelError, match=rf"{field} {getattr(identity, field)} in the file, {getattr(other, field)} in"
    ):
        identity.check(other, "calibration y")


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(numbers, min_size=8, max_size=8), st.text(max_size=9), st.integers(1, 10**6))
def test_metadata_round_trip(sample: list[float], kind: str, size: int) -> None:
    identity = ModelIdentity(kind, size, 1, 2, 3, 4, 5, tuple(sample * (SAMPLES // 8)))
    assert ModelIdentity.from_metadata(identity.to_metadata()) == identity


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "3", '{"sample": [1, 2]}', '{"sample": "x"}'])
def test_damaged_metadata_is_refused(text: str | None) -> None:
    with pytest.raises(ModelError, match="no readable model identity"):
        ModelIdentity.from_metadata({} if text is None else {"model": text})


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = tiny("llama")
    with pytest.raises(ModelError, match="meta device"):
        ModelIdentity.of(model)


def test_zero_embeddings_match_only_each_other() -> None:
    identity = ModelIdentity.of(tiny("llama"))
    zeros = replace(identity, sample=(0.0,) * SAMPLES)
    assert zeros.matches(zeros)
    assert not zeros.matches(identity)
