"""Options, refusals and the composed command, without vLLM."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import re
import shlex
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hisparse.cli.early import check_source, read_words
from hisparse.cli.main import app
from hisparse.cli.serve import compose, supervise
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, HiSparseError, InputError, ModelError, UnsupportedError
from hisparse.integrations.vllm.companions import of_rank
from hisparse.integrations.vllm.layout import choose_layout
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
    ("additional", "said"),
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
def test_wrong_options_are_named(additional: dict[str, Any], said: str) -> None:
    with pytest.raises(HiSparseError, match=said):
        Options.read(additional)


KINDS = SimpleNamespace(hidden_size=576, layer_types=["linear_attention", "sliding_attention", "full_attention"])


def vllm_config(**changes: Any) -> Any:
    """What is read of vLLM's configuration, with `section__name` changed."""
    sections: dict[str, dict[str, Any]] = {
        "model_config": {"use_mla": False, "hf_text_config": SimpleNamespace(hidden_size=576), "dtype": torch.bfloat16},
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "data_parallel_size": 1,
        },
        "cache_config": {"cache_dtype": "auto"},
        "scheduler_config": {"disable_hybrid_kv_cache_manager": False},
        "device_config": {"device_type": "cuda"},
    }
    sections["model_config"] |= dict.fromkeys(("is_hybrid", "enable_sleep_mode", "enable_cumem_allocator"), False)
    sections["parallel_config"] |= dict.fromkeys(("use_ubatching", "enable_elastic_ep"), False)
    top: dict[str, Any] = dict.fromkeys(("speculative_config", "diffusion_config", "kv_transfer_config"))
    top["use_v2_model_runner"] = False
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
        ({"parallel_config__use_ubatching": True}, "dual batch"),
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
    assert option(command, "--port") == "1234"
    assert "HiSparseMetrics" in option(command, "--kv-transfer-config")


@pytest.mark.parametrize(
    "extra",
    [
        ["--distributed-executor-backend", "ray", "--tensor-parallel-size", "8"],
        ["--enable-lora", "--lora-modules", "sql=/adapters/sql", "--max-lora-rank=64"],
        ["--enable-prefix-caching", "--max-num-seqs", "4"],
        ["-tp", "1", "-dcp", "1", "-pcp", "1", "-asc", "2", "-dph"],
    ],
    ids=["ray", "lora", "others", "short"],
)
def test_other_options_pass_through(extra: list[str], tmp_path: Path) -> None:
    assert words(extra=extra, machine={"gpus": 8, "memory": 0})[-len(extra) :] == extra
    run = typer.testing.CliRunner().invoke(app, ["serve", str(checkpoint(tmp_path)), "--dry-run", *extra])
    assert shlex.split(run.stdout)[-len(extra) :] == extra


def test_the_model_may_be_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hisparse.models.load.default_directory", lambda: str(checkpoint(tmp_path)))
    run = typer.testing.CliRunner().invoke(app, ["serve", "--max-model-len", "2048", "--dry-run", "--enforce-eager"])
    command = shlex.split(run.stdout)
    assert command[2] == str(tmp_path)
    assert command[-3:] == ["--max-model-len", "2048", "--enforce-eager"]


def test_without_a_gpu_nothing_is_compiled_unless_asked_for() -> None:
    assert "--enforce-eager" in words()
    assert "--enforce-eager" not in words(machine={"gpus": 1, "memory": 0})
    for asked in (["--no-enforce-eager"], ["-cc", "{}"], ["--compilation-config.mode=3"], ["-O2"], ["-O.mode=3"]):
        assert "--enforce-eager" not in words(extra=asked)
    assert words(extra=["--enforce-eager"]).count("--enforce-eager") == 1


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_ours(word: str) -> None:
    run = typer.testing.CliRunner().invoke(app, ["serve", word])
    assert run.exit_code == 0
    assert "--block-tokens" in run.stdout


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


@pytest.mark.parametrize("length", [[], ["--max-model-len", "512"], ["--max-model-len", "128K"]], ids=str)
def test_without_a_gpu_the_pool_and_its_rows_leave_half_of_the_memory(length: list[str], tmp_path: Path) -> None:
    model = checkpoint(tmp_path, max_position_embeddings=131072)
    command = words(str(model), extra=length)
    pool = int(option(command, "--kv-cache-memory-bytes"))
    context = {"512": 512}.get(length[-1] if length else "", 131072)
    layout = choose_layout(HiSparseConfig(), 2, 32, torch.bfloat16, context)
    rows = pool * layout.host_block_bytes / layout.block_bytes
    assert 0.45 * CPU["memory"] < pool + rows <= 0.5 * CPU["memory"]
    unknown = int(option(words(), "--kv-cache-memory-bytes"))
    assert 0 < unknown < 0.1 * CPU["memory"]


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A directory with the configuration of a small Llama, `changes` made to it."""
    folder.mkdir(exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


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
        ({"extra": ["--additional-config.hisparse", "x.json"]}, "--additional-config"),
        ({"model": "weights.gguf"}, "weights.gguf"),
        ({"model": " "}, "empty"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"model": str(Path(__file__).parent)}, "no config.json"),
        ({"model": __file__}, "hub ids"),
        ({"tlif": Path("nowhere.safetensors")}, "nowhere.safetensors"),
        ({"calibration": Path("nowhere.safetensors")}, "nowhere.safetensors"),
        ({"block_tokens": 100}, "--block-tokens 100"),
    ],
)
def test_what_the_command_cannot_say_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        words(**changes)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 .*leave it out"),
        (["--kv_cache_dtype=fp8_e5m2"], "--kv-cache-dtype fp8_e5m2"),
        (["--speculative-config", '{"method": "ngram"}'], "speculative decoding"),
        (["-sc", "{}"], "speculative decoding"),
        (["--speculative-config.method", "ngram"], "speculative decoding"),
        (["--spec-model", "draft"], "speculative decoding"),
        (["-pp", "2"], r"pipeline parallelism \(2\)"),
        (["--decode-context-parallel-size=2"], "decode context"),
        (["-pcp", "2"], "prefill context"),
        (["--enable-dbo"], "--enable-dbo"),
        (["--kv-offloading-size", "4"], "--kv-offloading-size"),
        (["--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], "NixlConnector"),
        (["--kv-transfer-config.kv_connector", "NixlConnector"], "NixlConnector"),
        (["--kv-transfer-config", "nixl"], "not JSON"),
        (["--disable-hybrid-kv-cache-manager"], "--disable-hybrid"),
        (["-pp", "two"], "--pipeline-parallel-size two"),
        (["-tp", "9" * 5000], "--tensor-parallel-size 9+: give a whole number"),
        (["--max-model-len", "0"], "--max-model-len 0"),
        (["--max-model-len", "-5"], "--max-model-len -5"),
        (["--max-model-len", "many"], "--max-model-len many"),
        (["--max-model-len", "1.5K"], "--max-model-len 1.5K"),
        (["--max-model-len", "9" * 400], "--max-model-len 9+: give a number"),
        (["--max-model-len=8193"], "made for 8192 tokens"),
        (["--shutdown-timeout", "soon"], "--shutdown-timeout soon"),
        (["--shutdown-timeout=-4"], "--shutdown-timeout -4: give a whole number"),
        (["--shutdown-timeout", "inf"], "--shutdown-timeout inf: give a whole number"),
        (["--shutdown-timeout", "2.5"], "--shutdown-timeout 2.5: give a whole number"),
        (["--kv-cache-memory-bytes", "1000"], "--kv-cache-memory-bytes 1000: one request of 8192 tokens takes"),
        (["--kv-cache-memory-bytes", "lots"], "--kv-cache-memory-bytes lots: give a number of bytes"),
        (["--kv-cache-memory-bytes=-5"], "--kv-cache-memory-bytes -5: give a number of bytes"),
        (["--block-tokens", "65536"], "hisparse_block_tokens = 65536: .* more than 8192 tokens"),
    ],
    ids=str,
)
def test_what_the_engine_would_refuse_is_refused_before_it_starts(extra: list[str], said: str, tmp_path: Path) -> None:
    """In one line of the command itself, with the value and what to do."""
    run = typer.testing.CliRunner().invoke(app, ["serve", str(checkpoint(tmp_path)), "--dry-run", *extra])
    assert isinstance(run.exception, HiSparseError)
    assert re.search(said, str(run.exception))
    assert "vllm serve" not in run.stdout


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        ({"layer_types": ["linear_attention", "full_attention", "full_attention"]}, "layers of kind linear_attention"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 64}, "sliding window of 64 tokens in every"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window of 4096 tokens in every"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"attn_logit_softcapping": 50.0}, "soft cap"),
        ({"model_type": "gpt_oss"}, "learned attention sinks"),
        ({"is_encoder_decoder": True}, "encoder_decoder"),
    ],
    ids=["MLA", "linear", "windows", "window without kinds", "ALiBi", "soft cap", "sinks", "encoder"],
)
def test_models_that_cannot_be_held_are_refused_before_vllm_starts(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        words(str(checkpoint(tmp_path, **changes)))


def test_kinds_of_layers_that_the_file_leaves_out_are_known(tmp_path: Path) -> None:
    """Gemma 3's configuration files name no layers: five of six have a window. Mistral's later ones have none."""
    gemma = checkpoint(tmp_path / "gemma", model_type="gemma3_text", num_hidden_layers=6, sliding_window=64)
    assert "--attention-config" in words(str(gemma))
    for window in ({"sliding_window": None}, {"sliding_window": 64}):
        mistral = checkpoint(tmp_path / "mistral", model_type="mistral", **window)
        more = ["--disable-sliding-window"] if window["sliding_window"] else []
        assert option(words(str(mistral), more), "--attention-backend") == "CUSTOM"


def test_a_configuration_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(InputError, match=r"config\.json: cannot be read"):
        words(str(tmp_path))


def test_a_model_that_cannot_be_fetched_is_refused_before_vllm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for offline in (True, False):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        check_source(str(tmp_path), {})
        check_source("s3://bucket/model", {})
        check_source("nobody/nothing", {"--revision": "main"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"nobody/nothing: not on this machine, and HF_HUB_OFFLINE is set"):
        check_source("nobody/nothing", {})


@pytest.mark.parametrize(
    ("config", "tokens", "said"),
    [
        ({"hidden_size": 2048}, None, "hidden_size = 2048, but the model's weights have 128"),
        ({"evicts": 1}, None, "evicts"),
        ({"vtq": {"page_size": 48}}, None, "hisparse_block_tokens = 256.*48.*use 288"),
        ({"selection": {"row_size": 64}}, 96, "hisparse_block_tokens = 96.*use 256"),
    ],
    ids=["hidden size", "unknown key", "pages", "block tokens"],
)
def test_a_configuration_of_another_model_is_refused_before_vllm_starts(
    config: dict[str, Any], tokens: int | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "hi-sparse-config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said):
        words(str(checkpoint(tmp_path / "model")), config=path, block_tokens=tokens)


@pytest.mark.parametrize("length", ["1", "7", "777", "8191", "8k", "8K", "1.5k", "auto", "-1"])
def test_odd_lengths_are_handed_on(length: str, tmp_path: Path) -> None:
    command = words(str(checkpoint(tmp_path)), extra=["--max-model-len", length])
    assert command[-2:] == ["--max-model-len", length]


def test_a_wider_window_may_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(checkpoint(tmp_path))
    words(model, extra=["--max-model-len", "16K", "--hf-overrides", '{"max_position_embeddings": 16384}'])
    words(model, extra=["--max-model-len", "16K", "--hf-overrides.max_position_embeddings", "16384"])
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    words(model, extra=["--max-model-len", "16K"])


def test_files_of_another_model_are_refused_before_vllm_starts(tmp_path: Path) -> None:
    """The files that ship with HiSparse belong to the default model; a GPU wants a calibration."""
    from safetensors.torch import save_file

    model = checkpoint(tmp_path)
    save_file({"model.embed_tokens.weight": torch.randn(512, 128)}, model / "model.safetensors")
    data = Path(str(importlib.resources.files("hisparse"))) / "data"
    tlif = next(iter(sorted(data.glob("*.tlif.safetensors"))))
    calibration = next(iter(sorted(data.glob("*.calibration.safetensors"))))
    for files in ({"tlif": tlif}, {"calibration": calibration}):
        with pytest.raises(ModelError, match="another model"):
            words(str(model), **files)
    with pytest.raises(ModelError, match=r"config\.json"):
        words(str(model), calibration=model / "config.json")
    gpu = {"gpus": 1, "memory": 0}
    with pytest.raises(ConfigError, match="no calibration"):
        words(str(model), machine=gpu)
    words(str(model), machine=gpu, extra=["--load-format", "dummy"])
    windows = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedError, match="leave it out"):
        words(str(checkpoint(tmp_path, layer_types=windows)), tlif=tlif)


@given(
    st.lists(
        st.tuples(st.sampled_from(["--a-b", "--c", "-tp", "--flag"]), st.sampled_from(["", "1", "-1", "x y", "{}"])),
        max_size=6,
    ),
    st.booleans(),
)
def test_words_are_read_as_they_were_written(pairs: list[tuple[str, str]], equals: bool) -> None:
    line: list[str] = []
    for name, value in pairs:
        line += [f"{name}={value}"] if equals and value else [name, value] if value else [name]
    expected = {{"-tp": "--tensor-parallel-size"}.get(name, name): value for name, value in pairs}
    assert read_words(line) == expected
    assert read_words([word.replace("--a-b", "--a_b") for word in line]) == expected


WORD = st.sampled_from(
    ["--max-model-len", "--kv-cache-dtype", "-tp", "-pp", "--kv-transfer-config", "--shutdown-timeout", "--dtype", "-"]
) | st.text(max_size=8)
VALUE = (
    st.none()
    | st.booleans()
    | st.integers(-3, 4096)
    | st.floats()
    | st.text(max_size=4)
    | st.lists(st.text(), max_size=2)
)
KEYS = ["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"]
KEYS += ["layer_types", "sliding_window", "rope_parameters", "text_config", "kv_lora_rank", "attn_config", "model_type"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(extra=st.lists(WORD, max_size=5), changes=st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=5))
def test_whatever_is_given_is_served_or_refused_in_words(
    extra: list[str], changes: dict[str, Any], tmp_path: Path
) -> None:
    with contextlib.suppress(HiSparseError):
        command = words(str(checkpoint(tmp_path, **changes)), extra=extra)
        assert command[len(command) - len(extra) :] == extra
