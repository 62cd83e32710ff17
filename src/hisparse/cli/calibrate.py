"""`hisparse calibrate`: measure the channel statistics that quantisation normalises by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hisparse.cli.generate import Device, Dtype
from hisparse.errors import InputError


def calibrate(
    corpus: Annotated[list[Path], typer.Option("--corpus", help="UTF-8 text files; repeat the option for more.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write, such as NAME.calibration.safetensors.")
    ],
    model: Annotated[str, typer.Option("--model", help="Model name, directory, GGUF file or hub id.")] = "default",
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to run.")] = 16,
    length: Annotated[int, typer.Option(min=5, help="Tokens a window.")] = 1024,
    span: Annotated[
        int | None, typer.Option(min=5, help="Positions the windows spread over; default: the model's, at most 32768.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Measure mean and spread of every K and V channel of a model on text, and write them to a file."""
    from rich.console import Console
    from rich.progress import Progress

    from hisparse.cli.generate import check_safetensors
    from hisparse.cli.progress import announce
    from hisparse.cli.session import read_model, read_text
    from hisparse.identity import ModelIdentity
    from hisparse.models import context_window
    from hisparse.vtq.calibration import calibrate as measure
    from hisparse.vtq.calibration import sample_windows, save_calibration

    check_safetensors(output, model)
    texts = [read_text(path) for path in corpus]
    network, tokenizer = read_model(model, device, dtype)
    window = context_window(network)
    if span is not None and window is not None and span > window:
        raise InputError(f"--span {span}: the model {model} has {window} positions; give --span {window} or less")
    pieces = sample_windows(tokenizer, texts, windows, length)
    console = Console(stderr=True)
    announce(console, f"Reading {windows} windows of {length} tokens ...")
    with Progress(console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task("windows", total=windows)
        stats = measure(network, pieces, span, lambda done, _: bar.update(task, completed=done))
    names = ", ".join(path.name for path in corpus)
    save_calibration(output, stats, ModelIdentity.of(network), f"{windows} windows of {length} tokens of {names}")
    first = stats[0]
    console.print(
        f"{output}: {len(stats)} layers x {first.heads} KV heads x {first.head_dim} channels, "
        f"{windows} windows of {length} tokens, {output.stat().st_size} bytes"
    )
