"""Calibration, measured over all positions and kept in a file that knows its model; and the error report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3 import Gemma3ForCausalLM
from transformers.models.llama import LlamaForCausalLM

from hisparse.config import VtqConfig
from hisparse.errors import FormatError, InputError, ModelError
from hisparse.identity import ModelIdentity
from hisparse.vtq import ChannelStats, channel_order, estimate_stats
from hisparse.vtq.calibration import (
    FILE_VERSION,
    SINKS,
    _coprime_step,
    calibrate,
    calibration_for,
    load_calibration,
    sample_windows,
    save_calibration,
    spread,
)
from hisparse.vtq.report import RULES, Rule, quantisation_report


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():  # attention sharp enough that errors are visible
        if "proj" in name or "embed" in name:
            weight.data.mul_(6)
    return model


@pytest.fixture(scope="module")
def windows() -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (length,), generator=make) for length in (40, 64, 33, 64, 50)]


def test_statistics_are_those_of_all_windows_without_their_sinks(llama: Any, windows: list[torch.Tensor]) -> None:
    stats = calibrate(llama, windows, span=1000)
    rows: list[list[np.ndarray]] = [[] for _ in range(6)]
    for i, ids in enumerate(windows):
        offset = spread(1000 - len(ids), 5)[i * 3 % 5]
        cache = DynamicCache()
        with torch.no_grad():
            llama(ids[None], position_ids=torch.arange(offset, offset + len(ids))[None], past_key_values=cache)
        for layer in range(3):
            for j, x in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
                rows[2 * layer + j].append(x[0, :, SINKS:].transpose(0, 1).double().numpy())
    for layer, s in enumerate(stats):
        k, v = np.concatenate(rows[2 * layer]), np.concatenate(rows[2 * layer + 1])
        np.testing.assert_allclose(s.k_mean, k.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(s.k_scale, k.std(0), rtol=1e-4)
        np.testing.assert_allclose(s.v_mean, v.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(s.v_scale, v.std(0), rtol=1e-4)
        assert torch.equal(s.order, channel_order(llama.config))


def test_windows_spread_over_all_positions() -> None:
    for count in range(1, 40):
        step = _coprime_step(count)
        assert sorted(i * step % count for i in range(count)) == list(range(count))
    assert spread(90, 4) == [0, 30, 60, 90]
    assert spread(90, 1) == [45]


def test_sliding_layers_give_the_tokens_they_still_hold() -> None:
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    stats = calibrate(Gemma3ForCausalLM(config).eval(), [torch.arange(60)])
    assert len(stats) == 2
    assert all(s.head_dim == 16 for s in stats)


def test_bad_windows_are_refused(llama: Any, windows: list[torch.Tensor]) -> None:
    with pytest.raises(InputError, match="no windows"):
        calibrate(llama, [])
    with pytest.raises(InputError, match="a window has 4 tokens; calibration takes 5 to 4096"):
        calibrate(llama, [torch.arange(4)])
    with pytest.raises(InputError, match="a window has 64 tokens; calibration takes 5 to 50"):
        calibrate(llama, windows, span=50)
    broken = LlamaForCausalLM(llama.config).eval()
    broken.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(FormatError, match="V of layer 1 holds inf or NaN in window 0"):
        calibrate(broken, windows)


class Letters:
    """A tokenizer of one token for every two characters."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) % 97 for c in text[::2]]


def test_windows_are_taken_from_all_over_every_text() -> None:
    texts = ["a" * 1000 + "b" * 1000, "c" * 300]
    pieces = sample_windows(Letters(), texts, 5, 100)
    assert [len(p) for p in pieces] == [100] * 5
    assert [chr(int(p[0]) + 97 * (int(p[0]) < 97 - 65)) for p in pieces[:1]] == ["a"]
    assert [int(p[0]) for p in pieces] == [0, 0, 1, 2, 2]  # a, a, b; c, c
    with pytest.raises(InputError, match="text 2 has 150 tokens, fewer than one window of 151"):
        sample_windows(Letters(), texts, 5, 151)
    with pytest.raises(InputError, match="2 texts for 1 windows"):
        sample_windows(Letters(), texts, 1, 10)


def test_file_reads_back_equal_and_knows_its_model(llama: Any, windows: list[torch.Tensor], tmp_path: Path) -> None:
    stats, identity = calibrate(llama, windows), ModelIdentity.of(llama)
    path = tmp_path / "new" / "m.calibration.safetensors"
    save_calibration(path, stats, identity, "a test")
    for loaded in (load_calibration(path, identity), calibration_for(identity, path)):
        assert loaded is not None
        for a, b in zip(stats, loaded, strict=True):
            for name in ("k_mean", "k_scale", "v_mean", "v_scale", "order"):
                assert torch.equal(getattr(a, name), getattr(b, name))
    assert calibration_for(identity) is None  # nothing is shipped for this model
    torch.manual_seed(5)
    other = ModelIdentity.of(LlamaForCausalLM(llama.config))
    with pytest.raises(ModelError, match="belongs to another model"):
        load_calibration(path, other)
    with pytest.raises(ModelError, match="belongs to another model"):
        calibration_for(other, path)


def test_damaged_files_are_refused(llama: Any, windows: list[torch.Tensor], tmp_path: Path) -> None:
    identity, path = ModelIdentity.of(llama), tmp_path / "c.safetensors"
    with pytest.raises(ModelError, match="not found"):
        load_calibration(path, identity)
    save_calibration(path, calibrate(llama, windows[:1]), identity, "a test")
    data = path.read_bytes()
    metadata = {"kind": "hisparse.calibration", "version": FILE_VERSION, **identity.to_metadata()}
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # not views of a file written below
    for content, message in (
        (data[: len(data) // 2], "damaged or not safetensors"),
        (b"", "damaged or not safetensors"),
        ((tensors, {**metadata, "kind": "x"}), "kind is 'x'"),
        ((tensors, {**metadata, "version": "7"}), "version '7', this hisparse reads 2"),
        (({k: t for k, t in tensors.items() if k != "v_mean"}, metadata), "has no v_mean"),
        (({**tensors, "k_scale": -tensors["k_scale"]}, metadata), "scale <= 0"),
        (({**tensors, "v_mean": tensors["v_mean"][:1]}, metadata), "damaged"),
    ):
        path.write_bytes(content) if isinstance(content, bytes) else save_file(*content[:1], path, content[1])
        with pytest.raises(ModelError, match=message):
            load_calibration(path, identity)


def test_report_shows_more_bits_as_smaller_errors(llama: Any, windows: list[torch.Tensor]) -> None:
    ids = torch.randint(0, 97, (300,), generator=torch.Generator().manual_seed(3))
    report = quantisation_report(llama, ids, VtqConfig(page_size=8), calibrate(llama, windows), queries=8)
    by_name = {e.rule.name: e for e in report.rules}
    assert list(by_name) == [rule.name for rule in RULES]
    assert report.rules[0].k.shape == (3, (300 - 4 - 128) // 8, 2)
    for field in ("k", "v", "attention", "output"):
        four, five, six = (float(getattr(by_name[name], field).mean()) for name in ("4", "5 never", "6"))
        assert four > 1.5 * five > 2.25 * six
    assert by_name["4"].kl > by_name["5 never"].kl > by_name["6"].kl > 0  # type: ignore[operator]
    assert by_name["5 rope"].split_share == 0.5
    worst = report.worst(5)
    errors = [row["attention_error"]["5 rope"] for row in worst]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == float(by_name["5 rope"].attention.max())
    assert json.loads(json.dumps(report.to_dict(5)))["blocks"] == 3 * 21 * 2
    assert llama.config._attn_implementation == "sdpa"  # as it was


def test_block_error_is_the_change_of_the_output_when_that_block_alone_is_packed(llama: Any) -> None:
    """Against attention computed twice in float64, for one layer, block by block."""
    from hisparse.vtq.probe import Probe, watching
    from hisparse.vtq.report import _packed

    ids = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(4))
    config, rule = VtqConfig(page_size=16), Rule("5", 5, 5, "rope")
    report = quantisation_report(llama, ids, config, None, [rule], queries=4, kl=False)
    probe = Probe(positions=torch.arange(72, 200, 32))
    with torch.no_grad(), watching(llama, probe):
        llama(ids[None])
    view = probe.layers[1]
    stats = estimate_stats(view.k[4:516], view.v[4:516], channel_order(llama.config))
    new_k, new_v, _, _ = _packed(view.k, view.v, stats, rule, config, 4)

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # the report's queries see the whole text
        k, v, q = (x.double() for x in (k, v, view.q.view(2, 2, -1, 16)))
        weights = (torch.einsum("hgsd,thd->hgst", q, k) * view.scaling).softmax(-1)
        return torch.einsum("hgst,thd->hgsd", weights, v)

    exact = attend(view.k, view.v)
    for page in range(4):
        k, v = view.k.clone(), view.v.clone()
        here = slice(4 + 16 * page, 20 + 16 * page)
        k[here], v[here] = new_k[page], new_v[page]
        change = (attend(k, v) - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        np.testing.assert_allclose(report.rules[0].attention[1, page].numpy(), change.numpy(), rtol=1e-3)


def test_a_text_without_a_page_is_refused(llama: Any) -> None:
    with pytest.raises(InputError, match=r"the text has 139 tokens.*give at least 140"):
        quantisation_report(llama, torch.arange(139) % 97, VtqConfig(page_size=8), None)


def test_commands_report_bad_input_without_running(tmp_path: Path) -> None:
    from hisparse.cli.main import load_command

    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for command, arguments, message in (
        ("calibrate", ["--corpus", str(empty), "-o", str(tmp_path / "x.safetensors")], "empty"),
        ("calibrate", ["--corpus", str(empty), "-o", str(tmp_path / "x.bin")], "must end in .safetensors"),
        ("bench-quant-error", ["--text", str(tmp_path / "none.txt")], "none.txt"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            load_command(command)(arguments, standalone_mode=False)


@pytest.mark.real_model
def test_the_default_models_calibration_is_shipped_and_near_what_a_text_shows(default_model: tuple[Any, Any]) -> None:
    model, tokenizer = default_model
    stats = calibration_for(ModelIdentity.of(model))
    assert stats is not None
    assert len(stats) == model.config.num_hidden_layers
    text = (
        "The lighthouse keeper wrote down the weather of every morning, and the names of the ships that passed. " * 20
    )
    ids = torch.tensor(tokenizer.encode(text)[:400])
    fresh = calibrate(model, [ids])
    for shipped, seen in zip(stats, fresh, strict=True):
        assert isinstance(shipped, ChannelStats)
        assert torch.equal(shipped.order, seen.order)
        # another text, one place: means differ by less than the spread, on the whole
        assert float(((shipped.v_mean - seen.v_mean) / shipped.v_scale).square().mean().sqrt()) < 1
    report = quantisation_report(model, ids, VtqConfig(), stats, RULES[:1], queries=4)
    assert 0 < (report.rules[0].kl or 0) < 0.05
