"""What vLLM has beside attention backends and HiSparse does not go with: refused by name, without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_options import checkpoint, vllm_config, words

from hisparse.config import HiSparseConfig
from hisparse.errors import InputError, UnsupportedError
from hisparse.integrations.vllm.options import refuse, refuse_layer

RANKS = {"parallel_config__data_parallel_size": 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_config__is_hybrid": True}, "layers that keep a state"),
        ({"model_config__enable_sleep_mode": True}, "sleep mode .*drop --enable-sleep-mode"),
        ({"model_config__enable_cumem_allocator": True}, "sleep mode .*--enable-cumem-allocator"),
        ({"diffusion_config": object()}, "drop --diffusion-config"),
        ({"parallel_config__enable_elastic_ep": True}, "drop --enable-elastic-ep"),
        (RANKS, "data parallelism .*first model runner"),
        ({"cache_config__cache_dtype": "float16"}, "--kv-cache-dtype float16 for a model in bfloat16"),
        (
            {"cache_config__cache_dtype": "bfloat16", "model_config__dtype": torch.float32},
            "--kv-cache-dtype bfloat16 for a model in float32",
        ),
        ({"cache_config__cache_dtype": "fp8"}, "where the checkpoint asks for it, say the model's dtype"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_an_engine_refuses_it(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        refuse(vllm_config(**change), HiSparseConfig())


@pytest.mark.parametrize(
    "change",
    [
        {"cache_config__cache_dtype": "bfloat16"},
        {"cache_config__cache_dtype": "float16", "model_config__dtype": torch.float16},
        {**RANKS, "use_v2_model_runner": True},
        {**RANKS, "device_config__device_type": "cpu"},
    ],
    ids=["the model's own dtype", "float16", "second model runner", "no attention of idle ranks on a CPU"],
)
def test_an_engine_takes_it(change: dict[str, Any]) -> None:
    refuse(vllm_config(**change), HiSparseConfig())


def test_a_layer_is_given_nothing_that_changes_its_attention() -> None:
    """Stock backends fail on options that they do not know; what is off, as models write it, passes."""
    refuse_layer(None, None, None, "decoder", None, {"sinks": None, "chunk_lookback": -1, "use_alibi_sqrt": False})
    for extra in ({"chunk_lookback": 1}, {"bias": torch.ones(2)}, {"use_alibi_sqrt": True}, {"mode": "other"}):
        with pytest.raises(UnsupportedError, match=f"a layer with {next(iter(extra))} given"):
            refuse_layer(None, None, None, "decoder", None, extra)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--ubatch-size", "2"], "dual batch overlap .*--ubatch-size"),
        (["--enable-sleep-mode"], "drop --enable-sleep-mode"),
        (["--enable_cumem_allocator"], "sleep mode .*--enable-cumem-allocator"),
        (["--enable-elastic-ep"], "drop --enable-elastic-ep"),
        (["-dc", "{}"], "drop --diffusion-config"),
        (["--diffusion-config.canvas_length", "32"], "drop --diffusion-config"),
        (["--dtype", "half", "--kv-cache-dtype", "bfloat16"], "--kv-cache-dtype bfloat16 for a model in float16"),
        (["--dtype=float", "--kv-cache-dtype=float16"], "--kv-cache-dtype float16 for a model in float32"),
    ],
    ids=str,
)
def test_the_command_refuses_it(extra: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=said):
        words(str(checkpoint(tmp_path)), extra)


@pytest.mark.parametrize(
    "extra",
    [
        ["--ubatch-size", "0"],
        ["--ubatch-size", "1"],
        ["--no-enable-sleep-mode"],
        ["--dtype", "half", "--kv-cache-dtype", "float16"],
        ["--kv-cache-dtype", "bfloat16"],
        ["--data-parallel-size", "2"],
    ],
    ids=str,
)
def test_the_command_takes_it(extra: list[str], tmp_path: Path) -> None:
    assert words(str(checkpoint(tmp_path)), extra)[-len(extra) :] == extra


def test_a_count_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--ubatch-size two: give a whole number from 0 on"):
        words(str(checkpoint(tmp_path)), ["--ubatch-size", "two"])


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
TENSORS = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}


@pytest.mark.parametrize(
    ("quantised", "said"),
    [
        ({**TENSORS, "kv_cache_scheme": SCHEME}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
    ],
    ids=["compressed-tensors", "ModelOpt", "ModelOpt, nested"],
)
def test_a_checkpoint_that_asks_for_quantised_keys_is_told_what_to_say(
    quantised: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """vLLM quantises keys and values on its own then; a word of the user's takes precedence."""
    model = str(checkpoint(tmp_path, quantization_config=quantised))
    for extra in ([], ["--kv-cache-dtype", "auto"]):
        with pytest.raises(UnsupportedError, match=f"--kv-cache-dtype {said} .*say the model's dtype"):
            words(model, extra)
    words(model, ["--kv-cache-dtype", "bfloat16"])


@pytest.mark.parametrize(
    "quantised",
    [{**TENSORS, "kv_cache_scheme": None}, {"quant_method": "modelopt", "kv_cache_quant_algo": None}, 7],
    ids=["no scheme", "no algorithm", "no object"],
)
def test_weights_may_be_quantised(quantised: Any, tmp_path: Path) -> None:
    words(str(checkpoint(tmp_path, quantization_config=quantised)))


@pytest.mark.parametrize("option", ["tlif", "calibration"])
def test_companions_among_the_weights_are_to_be_moved(option: str, tmp_path: Path) -> None:
    """vLLM takes every safetensors file of a folder for weights where no index names them."""
    model = checkpoint(tmp_path)
    (model / "own.safetensors").touch()
    with pytest.raises(InputError, match=f"--{option} .*own.safetensors: vLLM would read it as weights.*move it"):
        words(str(model), **{option: model / "own.safetensors"})
    (model / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    words(str(model), **{option: model / "own.safetensors"})
