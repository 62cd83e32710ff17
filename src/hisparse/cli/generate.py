"""`hisparse generate`: continue a text, or answer a question about it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hisparse.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from hisparse.cli.session import Result

Model = Annotated[
    str, typer.Option("--model", "-m", help="Directory, .gguf file or hub id; `default` is SmolLM2-135M-Instruct.")
]
PromptFile = Annotated[Path, typer.Option("--prompt-file", "-f", help="UTF-8 text file.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="hi-sparse-config.json; all keys optional.")]
Tlif = Annotated[Path | None, typer.Option("--tlif", help="File that `hisparse distill` made for this model.")]
Calibration = Annotated[
    Path | None, typer.Option("--calibration", help="File that `hisparse calibrate` made for this model.")
]
Chunk = Annotated[
    int | None, typer.Option("--chunk", min=1, help="Prefill the text in chunks of this many tokens, not in one piece.")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 ...; CUDA where there is one.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16, float16 or auto; float32 on the CPU, else auto.")
]


def check_temperature(value: float) -> float:
    """Raise InputError for a temperature that logits cannot be divided by in float32."""
    if 0 < value < 1e-6:
        raise InputError(f"--temperature {value}: too small to divide by; give 0, which is greedy, or 1e-6 to 100")
    return value


def generate(
    prompt_file: PromptFile,
    model: Model = "default",
    question: Annotated[
        str | None,
        typer.Option("--question", "-q", help="Asked once the text is stored; without it the text goes on."),
    ] = None,
    config: ConfigFile = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")] = 64,
    tlif: Tlif = None,
    calibration: Calibration = None,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", min=0.0, max=100.0, callback=check_temperature, help="0 is greedy.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampling, with a temperature.")] = 0,
    chunk: Chunk = None,
    compare_dense: Annotated[
        bool, typer.Option("--compare-dense", help="Run the dense cache too; show agreement and divergence.")
    ] = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write text, bytes, tokens, seconds ... to this file.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Continue a text, or answer a question about it, with the KV cache in a ninth of the memory.

    The generated text goes to stdout, everything about it to stderr.
    """
    from hisparse.cli import session

    text = session.read_text(prompt_file)
    settings = session.open_config(config)
    check_writable(json_out)
    loaded, tokenizer = session.open_model(model, device, dtype)
    prompt = session.build_prompt(tokenizer, text, question, loaded.device)
    session.check_window(loaded, prompt.length, max_new_tokens)
    result = session.complete(
        loaded,
        tokenizer,
        prompt,
        settings,
        max_new_tokens,
        tlif=tlif,
        calibration=calibration,
        temperature=temperature,
        seed=seed,
        chunk=chunk,
        compare=compare_dense,
        stream=True,
    )
    summary(result)
    if json_out is not None:
        write_json(json_out, {"model": model, **result.to_json()})


def check_writable(path: Path | None) -> None:
    """Raise InputError before the work, not after it, where a result could not be written."""
    if path is None:
        return
    try:  # permission bits do not tell: root ignores them, and some file systems take no files
        if path.is_dir():
            raise InputError(f"{path}: a directory; give the path of a file to write")
        partial = _partial(path)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); create its folder or name another") from None


def check_safetensors(output: Path, model: str) -> None:
    """Raise InputError before the work where `output` is not the name of a safetensors file that can be written, or
    lies among the weights of `model`."""
    check_writable(output)
    if output.suffix != ".safetensors":
        raise InputError(f"output {output}: the name must end in .safetensors, as in {output.stem}.safetensors")
    if Path(model).is_dir() and output.resolve().parent == Path(model).resolve():
        raise InputError(
            f"output {output}: vLLM reads every .safetensors file in a model's folder as weights and fails at this; "
            "write it to another folder"
        )


def check_picture(path: Path | None) -> None:
    """Raise InputError before the work where `path` is not the name of a picture that can be drawn and written."""
    if path is None:
        return
    check_writable(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # A name without a suffix gets one, which is another file than the one asked for.
    if path.suffix[1:].lower() not in FigureCanvasAgg.get_supported_filetypes():
        raise InputError(f"picture {path}: no kind of picture is called {path.suffix!r}; give the path of a .png file")


def check_folder(option: str, folder: Path) -> None:
    """Make `folder` if it is not there. Raises InputError where it is no folder, or takes no files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe.partial"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"{option} {folder}: no folder that files can be written to ({error.strerror}); name another"
        ) from None


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write `data`, indented, in one step: a reader sees the whole file or none."""
    partial = _partial(path)
    try:
        partial.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); free disk space or name another") from None


def size(count: float) -> str:
    """Bytes for people: 1 KiB = 1024 bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def summary(result: Result) -> None:
    """Print what a run cost and how it compares, on stderr."""
    from rich.console import Console

    Console(file=sys.stderr, highlight=False).print(summary_table(result.to_json()))


def summary_table(data: dict[str, Any]) -> Table:
    """The table of :func:`summary`, from the machine-readable form."""
    from rich.table import Table

    kv, tokens, recall, seconds = data["kv"], data["tokens"], data["recall"], data["seconds"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()

    def line(name: str, text: str) -> None:
        table.add_row(name, text)

    line("tokens", f"{data['prompt_tokens']} prompt, {data['new_tokens']} new")
    line("KV cache", f"{size(kv['gpu_bytes'])} on the device, {size(kv['host_bytes'])} on the host")
    line("capacity", f"x{kv['capacity']:.2f} of a dense bf16 cache ({size(kv['dense_bytes'])})")
    if kv["target"] is not None and kv["capacity"] < kv["target"]:
        line("", f"short of the target of x{kv['target']:g}: the context is too short for it, or the settings too rich")
    line(
        "where",
        f"{tokens['kept']} kept packed, {tokens['set_aside']} set aside, {tokens['dense']} dense; "
        f"{tokens['anchors']} anchors, {data['blocks']} blocks",
    )
    where = _number(recall["steps"], "decode step")
    if recall["chunks"]:
        where += f" and {_number(recall['chunks'], 'chunk')} of the prompt"
    line("recalled", f"{recall['blocks']} rows, {size(recall['bytes'])}, in {where}")
    rate = data["new_tokens"] / seconds["decode"] if seconds["decode"] else 0.0
    line("seconds", f"prefill {seconds['prefill']:.2f}, decode {seconds['decode']:.2f} ({rate:.1f} tokens/s)")
    if "dense" in data:
        dense = data["dense"]
        line(
            "dense cache",
            f"agrees on {dense['token_agreement']:.1%} of the tokens, mean KL {dense['mean_kl']:.4f} nats",
        )
        line("  seconds", f"prefill {dense['seconds']['prefill']:.2f}, decode {dense['seconds']['decode']:.2f}")
        line("  text", dense["text"].strip())
    return table
