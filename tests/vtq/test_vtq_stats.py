"""Channel statistics, the RoPE order (against what models really rotate), the peak test, and the choice of a twin."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hisparse.errors import ConfigError, FormatError
from hisparse.ops._dispatch import backend_for, has_triton, select_backend
from hisparse.vtq import ChannelStats, channel_order, estimate_stats
from hisparse.vtq.peaks import peak_separation
from hisparse.vtq.stats import SCALE_FLOOR, permute_channels

MODELS = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "glm4", "glm", "cohere", "phi", "gpt_neox"]


def tiny(model_type: str, **extra: Any) -> Any:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    if model_type == "gemma3_text":
        extra["layer_types"] = ["full_attention"]
    if model_type not in ("gpt_neox", "phi"):
        sizes |= {"num_key_value_heads": 1, "head_dim": 32}
    return AutoConfig.for_model(model_type, **{**sizes, "pad_token_id": 0, **extra})


def turn(config: Any) -> torch.Tensor:
    """How far each channel of a key moves from position 0 to 1: 1 - cos(angle), by the model's own rotary code."""
    model = AutoModelForCausalLM.from_config(config)
    code = importlib.import_module(type(model).__module__)
    body = model.base_model
    dim = 32
    kwargs = {"layer_type": "full_attention"} if config.model_type == "gemma3_text" else {}
    cos, sin = body.rotary_emb(torch.zeros(1, 2, dim), torch.tensor([[0, 1]]), **kwargs)
    unit = torch.eye(dim)[None, :, None].expand(1, dim, 2, dim)  # [1, unit vector as head, position, channel]
    rotated = cos.shape[-1]
    if config.model_type in ("glm4", "glm"):  # their code slices the rotated channels itself
        rotated = dim
    part = unit[..., :rotated]
    _, keys = code.apply_rotary_pos_emb(part, part, cos, sin)
    keys = torch.cat([keys, unit[..., rotated:]], -1)
    return (keys[0, :, 0] - keys[0, :, 1]).diagonal()


@pytest.mark.parametrize("model_type", MODELS)
def test_the_first_half_is_what_the_model_rotates_slowest(model_type: str) -> None:
    config = tiny(model_type)
    moved, order = turn(config), channel_order(config)
    assert sorted(order.tolist()) == list(range(32))
    assert moved[order[:16]].max() <= moved[order[16:]].min() + 1e-7
    assert (order[:16].diff() > 0).all()  # each half in channel order: few runs
    assert (order[16:].diff() > 0).all()


def test_known_orders() -> None:
    a = list(range(32))
    assert channel_order(tiny("llama")).tolist() == a[8:16] + a[24:] + a[:8] + a[16:24]
    assert channel_order(tiny("glm4")).tolist() == a[16:] + a[:16]  # half of the channels are not rotated at all
    partial = tiny("glm4", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0})
    assert channel_order(partial).tolist() == a[16:] + a[:16]  # interleaved pairs: later channels are slower


def test_runs_cover_the_order_and_stop_at_the_middle() -> None:
    for order in (torch.arange(16), torch.randperm(16), channel_order(tiny("llama"))):
        stats = ChannelStats.identity(2, len(order), order)
        x = torch.randn(3, len(order))
        assert torch.equal(permute_channels(x, stats.runs), x[:, order])
        half = len(order) // 2
        assert all(place + width <= half or place >= half for place, _, width in stats.runs)


def test_estimate_is_mean_and_standard_deviation() -> None:
    k, v = torch.randn(2, 2, 50, 3, 16, generator=torch.Generator().manual_seed(0)) * 3 + 7
    stats = estimate_stats(k, v.bfloat16(), torch.arange(16))
    rows = k.double().numpy().reshape(100, 3, 16)
    np.testing.assert_allclose(stats.k_mean.numpy(), rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.k_scale.numpy(), rows.std(0), rtol=1e-4)
    assert stats.v_mean.dtype == torch.float32


def test_scales_have_a_floor() -> None:
    k = torch.randn(100, 2, 16)
    k[:, 0, 3] = 5.0  # a channel that does not move
    k[:, 1] = 0.0  # a head that does not move
    stats = estimate_stats(k, k, torch.arange(16))
    assert float(stats.k_scale[0, 3]) == pytest.approx(SCALE_FLOOR, rel=0.3)
    assert (stats.k_scale[1] == 1).all()


def test_kernels_find_statistics_as_they_read_them() -> None:
    """One scale for all heads, means of heads last, an order of 32 bits: rows of float32, an order of 64 bits."""
    mean, scale = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.rand(8) + 0.5
    stats = ChannelStats(
        mean.T, scale.expand(3, 8), mean.T, scale.expand(3, 8), torch.arange(16).flip(0)[::2].int() // 2
    )
    for x, want in ((stats.k_mean, mean.T), (stats.k_scale, scale.expand(3, 8)), (stats.v_mean, mean.T)):
        assert x.is_contiguous()
        assert torch.equal(x, want)
    assert stats.order.dtype == torch.int64
    assert stats.order.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert all(x.is_contiguous() for x in (stats.v_scale, stats.order, stats.k_rate, stats.v_rate, stats.query_basis))


def test_bad_statistics_are_refused() -> None:
    good = ChannelStats.identity(2, 8)
    with pytest.raises(FormatError, match="k_mean has shape"):
        ChannelStats(good.k_mean[0], good.k_scale, good.v_mean, good.v_scale, good.order)
    with pytest.raises(FormatError, match=r"v_scale is torch\.float64"):
        ChannelStats(good.k_mean, good.k_scale, good.v_mean, good.v_scale.double(), good.order)
    with pytest.raises(FormatError, match="scale <= 0"):
        ChannelStats(good.k_mean, good.k_scale * 0, good.v_mean, good.v_scale, good.order)
    with pytest.raises(FormatError, match="not a permutation of the 8 channels"):
        ChannelStats(good.k_mean, good.k_scale, good.v_mean, good.v_scale, good.order // 2)
    for x, what in ((torch.zeros(0, 2, 8), "no token"), (torch.full((3, 2, 8), float("nan")), "inf or NaN")):
        with pytest.raises(FormatError, match=what):
            estimate_stats(x, x, good.order)
    assert good.to("cpu") is good


def test_peaks_of_known_mixtures() -> None:
    make = torch.Generator().manual_seed(0)
    for distance, weight, spread in ((8.0, 0.5, 1.0), (6.0, 0.3, 0.7), (20.0, 0.1, 1.0)):
        low = torch.randn(40, 512, generator=make) * spread
        high = torch.randn(40, 512, generator=make) + distance
        x = torch.where(torch.rand(40, 512, generator=make) < weight, low, high)
        extent = x.amax(1) - x.amin(1)
        torch.testing.assert_close(peak_separation(x), distance / extent, rtol=0.06, atol=0.01)


def test_peak_separation_ignores_place_and_size_and_handles_constants() -> None:
    x = torch.randn(20, 200, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(peak_separation(x * 37 - 12), peak_separation(x), rtol=1e-3, atol=1e-4)
    assert (peak_separation(torch.full((3, 64), 7.0)) == 0).all()
    assert peak_separation(torch.randn(5, 1)).tolist() == [0.0] * 5
    two = torch.tensor([[0.0, 1.0] * 32])
    assert float(peak_separation(two)) == pytest.approx(1, abs=1e-3)
    assert torch.isfinite(peak_separation(torch.randn(50, 3).exp().exp())).all()


def test_a_single_gaussian_is_less_separated_than_two() -> None:
    make = torch.Generator().manual_seed(2)
    one = torch.randn(200, 512, generator=make)
    two = one + 5 * (torch.rand(200, 512, generator=make) < 0.5)
    assert float(peak_separation(one).max()) < float(peak_separation(two).min())


def test_backend_follows_device_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HISPARSE_BACKEND", raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert backend_for("pack", cpu) == "reference"
    assert backend_for("unpack", cuda) == ("triton" if has_triton("unpack") else "reference")
    assert backend_for("no_such_op", cuda) == "reference"
    assert select_backend("pack", cpu).__name__ == "hisparse.ops.pack.reference"
    monkeypatch.setenv("HISPARSE_BACKEND", "reference")
    assert backend_for("pack", cuda) == "reference"
    monkeypatch.setenv("HISPARSE_BACKEND", "cuda")
    with pytest.raises(ConfigError, match="called with tensors on cpu"):
        backend_for("unpack", cpu)
    monkeypatch.setenv("HISPARSE_BACKEND", "opencl")
    with pytest.raises(ConfigError, match="HISPARSE_BACKEND = 'opencl'; use reference, triton or cuda"):
        backend_for("pack", cpu)
    monkeypatch.setenv("HISPARSE_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="called with tensors on cpu; unset it, or set TRITON_INTERPRET=1"):
        backend_for("unpack", cpu)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("hisparse.ops._dispatch.has_triton", lambda op: False)
    with pytest.raises(ConfigError, match="no_such_op has no kernel here"):
        backend_for("no_such_op", cpu)
    monkeypatch.setattr("hisparse.ops._dispatch.has_triton", lambda op: True)
    assert backend_for("pack", cpu) == "triton"
