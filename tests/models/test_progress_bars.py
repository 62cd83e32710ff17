"""Progress bars of other libraries: none while a model is loaded or converted, and the user's settings left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging

from hisparse.models import load_model
from hisparse.models.bars import without_bars

HIDDEN, INNER, HEADS, HEAD, VOCABULARY = 32, 48, 4, 8, 258


def tiny_gguf(path: Path) -> Path:
    """A Llama of one layer with random weights and a byte tokenizer."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *(chr(256 + i) for i in range(VOCABULARY - 3)), "\u0100\u0101"])
    writer.add_token_types([3, 3, *[1] * (VOCABULARY - 2)])
    writer.add_token_merges(["\u0100 \u0101"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
        **{f"blk.0.attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")},
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def settings() -> tuple[Any, ...]:
    hook = logging.set_tqdm_hook(None)
    logging.set_tqdm_hook(hook)
    enabled = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    return hook, modeling_gguf_pytorch_utils.tqdm, *enabled


def test_a_conversion_says_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "cache"))
    path = tiny_gguf(tmp_path / "tiny.gguf")
    before = settings()
    with without_bars():
        model, _ = load_model(str(path))
    assert model.config.hidden_size == HIDDEN
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["Converting tiny.gguf (once; about half a minute) ..."]
    assert captured.out == ""
    assert settings() == before


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_users_settings_hold_again_afterwards(
    drawn: bool, fails: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", None)
    was = are_progress_bars_disabled()
    (enable_progress_bars if drawn else disable_progress_bars)()
    try:
        before = settings()
        with pytest.raises(ZeroDivisionError) if fails else without_bars(), without_bars():
            assert are_progress_bars_disabled()
            for _ in logging.tqdm(range(3), desc="hidden"):
                pass
            for _ in modeling_gguf_pytorch_utils.tqdm(range(3), desc="hidden"):
                pass
            if fails:
                raise ZeroDivisionError
        assert settings() == before
        assert "hidden" not in capsys.readouterr().err
        for _ in logging.tqdm(range(3), desc="shown"):
            pass
        assert ("shown" in capsys.readouterr().err) == logging.is_progress_bar_enabled()
    finally:
        (disable_progress_bars if was else enable_progress_bars)()


def test_what_the_environment_says_of_the_hubs_bars_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", False)
    was = are_progress_bars_disabled()
    with without_bars():
        assert are_progress_bars_disabled() == was
