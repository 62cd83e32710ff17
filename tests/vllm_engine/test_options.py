"""Options, refusals and the composed command, without vLLM."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hisparse.cli.serve import compose, supervise
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, HiSparseError, InputError, UnsupportedError
from hisparse.integrations.vllm.companions import of_rank
from hisparse.integrations.vllm.options import Options, refuse, refuse_layer
from hisparse.vtq.stats import ChannelStats

CPU = {"gpus": 0, "memory": 4 << 30}


def test_options_are_a_path_or_the_configuration_itself(tmp_path: Path) -> None:
    path = tmp_path / "hi-sparse-config.json"
    path.write_text('{"selection": {"sketch_bits": 1}}')
    assert Options.read({"hisparse": str(path)}).config.selection.sketch_bits == 1
    assert Options.read({"hisparse": {"evict": "none"}, "hisparse_block_tokens": 64}).block_tokens == 64
    assert Options.read({}).config == HiSparseConfig()
    assert Options.read({"other": 1}).config == HiSparseConfig()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hisparse_tliff": "x"}, "hisparse_tliff"),
        ({"hisparse": 3}, "hisparse = 3"),
        ({"hisparse": "nowhere.json"}, "nowhere.json"),
        ({"hisparse": {"evicts": "none"}}, "evicts"),
        ({"hisparse_block_tokens": "many"}, "many"),
        ({"hisparse_block_tokens": True}, "True"),
        ({"hisparse_calibration": "nowhere.safetensors"}, "nowhere.safetensors"),
        ({"hisparse_tlif": 5}, "hisparse_tlif = 5"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(HiSparseError, match=said):
        Options.read(given)


KINDS = SimpleNamespace(hidden_size=576, layer_types=["linear_attention", "sliding_attention", "full_attention"])


def vllm_config(**changes: Any) -> Any:
    """What is read of vLLM's configuration, with `section__name` changed."""
    sections: dict[str, dict[str, Any]] = {
        "model_config": {"use_mla": False, "hf_text_config": SimpleNamespace(hidden_size=576)},
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_dbo": False,
        },
        "cache_config": {"cache_dtype": "auto"},
        "scheduler_config": {"disable_hybrid_kv_cache_manager": False},
    }
    top: dict[str, Any] = {"speculative_config": None, "kv_transfer_config": None}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        (sections[section] if name else top)[name or section] = value
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in sections.items()}, **top)


def test_an_ordinary_model_is_not_refused() -> None:
    refuse(vllm_config(), HiSparseConfig(hidden_size=576))
    ours = SimpleNamespace(kv_connector="HiSparseMetrics")
    refuse(vllm_config(kv_transfer_config=ours), HiSparseConfig())
    refuse_layer(None, None, None, "decoder", None, {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_config__use_mla": True}, "MLA"),
        ({"model_config__hf_text_config": KINDS}, "layers of kind linear_attention"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="OffloadingConnector")}, "OffloadingConnector"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context"),
        ({"parallel_config__enable_dbo": True}, "dual batch"),
        ({"cache_config__cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ({"scheduler_config__disable_hybrid_kv_cache_manager": True}, "disable-hybrid"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        refuse(vllm_config(**change), HiSparseConfig())


def test_a_model_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_size = 2048"):
        refuse(vllm_config(), HiSparseConfig(hidden_size=2048))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (([1.0], None, None, "decoder", None, {}), "ALiBi"),
        ((None, 4096, None, "decoder", None, {}), "sliding window"),
        ((None, None, 30.0, "decoder", None, {}), "soft cap"),
        ((None, None, None, "encoder_only", None, {}), "encoder_only"),
        ((None, None, None, "decoder", "layer.0", {}), "shared"),
        ((None, None, None, "decoder", None, {"sinks": object()}), "sinks"),
    ],
)
def test_layers_that_are_not_plain_are_refused(layer: tuple[Any, ...], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        refuse_layer(*layer)


def test_ranks_share_the_heads_of_the_statistics() -> None:
    stats = ChannelStats.identity(8, 32)
    stats.k_mean.copy_(torch.arange(8.0)[:, None].expand(8, 32))
    for ranks, heads in ((1, 8), (2, 4), (8, 1), (16, 1)):
        seen = []
        for rank in range(ranks):
            part = of_rank(stats, rank, heads, 8, ranks)
            assert part.heads == heads
            seen += part.k_mean[:, 0].tolist()
        assert sorted(set(seen)) == list(range(8))
        assert seen == sorted(seen)


def words(model: str = "org/model", extra: list[str] | None = None, **changes: Any) -> list[str]:
    values: dict[str, Any] = {"config": None, "tlif": None, "calibration": None, "block_tokens": None, "machine": CPU}
    values.update(changes)
    return compose(model, extra=extra or [], **values)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_command_says_all_that_vllm_needs(tmp_path: Path) -> None:
    path = tmp_path / "hi-sparse-config.json"
    path.write_text("{}")
    command = words(config=path, block_tokens=128, extra=["--port", "1234"])
    assert command[:3] == ["vllm", "serve", "org/model"]
    assert option(command, "--attention-backend") == "CUSTOM"
    additional = json.loads(option(command, "--additional-config"))
    assert additional == {"hisparse": str(path), "hisparse_block_tokens": 128}
    assert int(option(command, "--kv-cache-memory-bytes")) == 1 << 30
    assert option(command, "--port") == "1234"
    assert "HiSparseMetrics" in option(command, "--kv-transfer-config")


@pytest.mark.parametrize(
    "extra",
    [
        ["--distributed-executor-backend", "ray", "--tensor-parallel-size", "8"],
        ["--enable-lora", "--lora-modules", "sql=/adapters/sql", "--max-lora-rank=64"],
        ["--enable-prefix-caching", "--max-num-seqs", "4"],
    ],
    ids=["ray", "lora", "others"],
)
def test_other_options_pass_through(extra: list[str]) -> None:
    assert words(extra=extra, machine={"gpus": 8, "memory": 0})[-len(extra) :] == extra


def test_what_the_user_says_stands() -> None:
    given = ["--kv-cache-memory-bytes=7", "--shutdown-timeout", "0", "--kv-transfer-config", "{}"]
    command = words(extra=given)
    assert command[-5:] == given
    for name in ("--kv-cache-memory-bytes", "--shutdown-timeout", "--kv-transfer-config"):
        assert sum(word.startswith(name) for word in command) == 1
    assert "--tensor-parallel-size" not in words(extra=["-tp", "2"], machine={"gpus": 8, "memory": 0})


@pytest.mark.parametrize(
    ("server", "code"),
    [("pass", 0), ("raise SystemExit(3)", 3)],
)
def test_the_servers_exit_code_is_ours(server: str, code: int) -> None:
    assert supervise([sys.executable, "-c", server], 0) == code


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "signal.SIG_IGN"], ids=["ends", "stays"])
def test_a_server_told_to_end_is_gone(handler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends by itself, and one that would wait for its clients for ever."""
    monkeypatch.setattr("hisparse.cli.serve.LINGER", 0.2)
    server = f"import signal, time; signal.signal(signal.SIGTERM, {handler}); print(flush=True); time.sleep(100)"
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert supervise([sys.executable, "-c", server], 0.2) == 0


@pytest.mark.parametrize(("gpus", "heads", "ranks"), [(8, 8, 8), (8, 4, 4), (6, 8, 4), (2, 3, 1), (8, 0, 8)])
def test_gpus_share_the_heads_evenly(gpus: int, heads: int, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_key_value_heads": heads} if heads else {}))
    command = words(str(tmp_path), machine={"gpus": gpus, "memory": 0})
    assert option(command, "--tensor-parallel-size") == str(ranks)
    assert "--kv-cache-memory-bytes" not in command


@pytest.mark.parametrize("nested", [False, True], ids=["text model", "text model within another"])
def test_layers_with_a_window_are_left_to_a_stock_backend(nested: bool, tmp_path: Path) -> None:
    text = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if nested else text))
    command = words(str(tmp_path))
    assert json.loads(option(command, "--attention-config")) == {"backend_per_kind": {"full_attention": "CUSTOM"}}
    assert "--attention-backend" not in command
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": ["full_attention"] * 4}))
    assert option(words(str(tmp_path)), "--attention-backend") == "CUSTOM"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"extra": ["--attention-config", "{}"]}, "--attention-config"),
        ({"extra": ["--attention-backend", "FLASH_ATTN"]}, "--attention-backend"),
        ({"extra": ["--additional_config={}"]}, "--additional-config"),
        ({"model": "weights.gguf"}, "weights.gguf"),
        ({"tlif": Path("nowhere.safetensors")}, "nowhere.safetensors"),
    ],
)
def test_what_the_command_cannot_say_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        words(**changes)
