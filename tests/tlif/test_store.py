"""TLIF files: round trip, damage, other models; the choice of a scorer; the file that is shipped."""

from __future__ import annotations

import contextlib
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tlif_tools import tiny

from hisparse.config import TlifConfig
from hisparse.errors import ConfigError, ModelError
from hisparse.identity import ModelIdentity
from hisparse.tlif import (
    PARAMETER_LIMIT,
    NoveltyScorer,
    RandomScorer,
    Tlif,
    TlifCard,
    TlifScorer,
    load_tlif,
    read_card,
    save_tlif,
    scorer_for,
    shipped_tlifs,
)

IDENTITY = ModelIdentity.of(tiny("llama"))
CARD = TlifCard(IDENTITY, "key_distinctiveness", 32, "hisparse distill ...", {"held_out": {"all": {"auc": 0.5}}})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.tlif.safetensors"
    torch.manual_seed(0)
    save_tlif(Tlif(IDENTITY.value_features), CARD, path)
    return path


def rewrite(path: Path, tensors: dict[str, Any] | None = None, **metadata: str) -> Path:
    """The file with some tensors and metadata replaced."""
    with safe_open(path, framework="pt") as opened:
        old = dict(opened.metadata())
    save_file({**load_file(path), **(tensors or {})}, path, metadata={**old, **metadata})
    return path


def test_round_trip(file: Path) -> None:
    torch.manual_seed(0)
    expected = TlifScorer(Tlif(IDENTITY.value_features), 32)
    values = torch.randn(100, IDENTITY.value_features)
    scorer = load_tlif(file, IDENTITY)
    assert torch.equal(scorer.score(values, None)[0], expected.score(values, None)[0])
    assert read_card(file) == CARD
    assert scorer.prefix_length == 32
    assert list(file.parent.iterdir()) == [file]


def test_another_model_is_refused(file: Path) -> None:
    with pytest.raises(ModelError, match=r"a\.tlif\.safetensors belongs to another model.*hisparse distill"):
        load_tlif(file, ModelIdentity.of(tiny("llama", seed=1)))
    load_tlif(file, None)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_short_anywhere_is_refused(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    cut = file.with_name("cut")
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelError, match="damaged or cut short"):
        load_tlif(cut, IDENTITY)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 3000), byte=st.integers(0, 255))
def test_a_changed_header_byte_loads_or_is_refused(file: Path, at: int, byte: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] = byte
    changed = file.with_name("changed")
    changed.write_bytes(data)
    with contextlib.suppress(ModelError):
        load_tlif(changed, IDENTITY)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": "other"}, "format 'other'"),
        ({"version": "99"}, "version '99'"),
        ({"statistics": '["x"]'}, "made for statistics"),
        ({"prefix_length": "0"}, "over 0 tokens"),
        ({"prefix_length": "many"}, "unreadable metadata"),
        ({"scores": "{"}, "unreadable metadata"),
        ({"model": "{}"}, "unreadable metadata"),
    ],
)
def test_foreign_metadata_is_refused(file: Path, metadata: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_tlif(rewrite(file, **metadata), IDENTITY)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"first.weight": torch.zeros(2, 2)}, r"first.weight is torch.float32 \(2, 2\)"),
        ({"second.bias": torch.tensor([torch.nan])}, "second.bias .* not finite"),
        ({"second.bias": torch.zeros(1, dtype=torch.float16)}, r"second.bias is torch.float16"),
        ({"first.bias": torch.zeros(9999)}, "limit of 15000"),
        ({"third": torch.zeros(1)}, "holds tensors"),
    ],
)
def test_foreign_tensors_are_refused(file: Path, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_tlif(rewrite(file, tensors), IDENTITY)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load_tlif(tmp_path / "nothing", IDENTITY)
    with pytest.raises(ModelError, match="no such file"):
        load_tlif(tmp_path, IDENTITY)


def test_the_config_chooses_the_scorer(file: Path) -> None:
    assert isinstance(scorer_for(IDENTITY, TlifConfig(scorer="novelty")), NoveltyScorer)
    assert isinstance(scorer_for(IDENTITY, TlifConfig(scorer="random")), RandomScorer)
    assert isinstance(scorer_for(IDENTITY, TlifConfig(), file), TlifScorer)
    with pytest.raises(ConfigError, match=r'"random" reads no file'):
        scorer_for(IDENTITY, TlifConfig(scorer="random"), file)


def test_a_model_without_tlif_gets_novelty_and_a_warning() -> None:
    with pytest.warns(UserWarning, match="hisparse distill"):
        scorer = scorer_for(IDENTITY, TlifConfig(prefix_length=64))
    assert isinstance(scorer, NoveltyScorer)
    assert scorer.prefix_length == 64


@pytest.mark.parametrize("path", shipped_tlifs(), ids=lambda path: path.name)
def test_a_shipped_file_is_small_scored_and_found(path: Path) -> None:
    card = read_card(path)
    assert path.stat().st_size < 100_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer = scorer_for(replace(card.model), TlifConfig())
    assert isinstance(scorer, TlifScorer)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    assert int(metadata["parameters"]) < PARAMETER_LIMIT
    assert json.loads(metadata["scores"])["held_out"]["all"]["auc"] > 0.5
    assert metadata["command"].startswith("hisparse distill")


def test_a_tlif_is_shipped() -> None:
    assert [path.name for path in shipped_tlifs()] == ["smollm2-135m-instruct.tlif.safetensors"]
