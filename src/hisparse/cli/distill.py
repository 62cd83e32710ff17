"""`hisparse distill`: make a TLIF for a model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from hisparse.cli.generate import Device, Dtype
from hisparse.cli.progress import announce
from hisparse.errors import InputError


def distill(
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write (*.tlif.safetensors).")],
    corpus: Annotated[
        list[Path], typer.Option("--corpus", help="Plain text files to learn from (repeat, or list them).")
    ],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILES]...", help="More corpus files.")] = None,
    model: Annotated[
        str, typer.Option("--model", help="Model: default, a directory, a GGUF file or a hub id.")
    ] = "default",
    held_out: Annotated[
        list[Path] | None,
        typer.Option("--held-out", help="Texts for the scores alone (default: an eighth of the corpus)."),
    ] = None,
    label: Annotated[
        str, typer.Option("--label", help="key_distinctiveness, received_attention or received_attention_mean.")
    ] = "key_distinctiveness",
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to label.")] = 200_000,
    chunk: Annotated[int, typer.Option("--chunk", help="Tokens the model reads at once.")] = 1024,
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the labelled tokens.")] = 6,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the excerpts and of the training.")] = 0,
    prefix_length: Annotated[
        int, typer.Option("--prefix-length", help="Tokens in the window of the statistics.")
    ] = 128,
    device: Device = None,
    dtype: Dtype = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the labels of an interrupted run.")] = False,
) -> None:
    """Learn from a frozen model which tokens matter, and write that as a TLIF file.

    The model labels the tokens of the corpus, a network of fewer than 15 000 parameters learns the labels. An
    interrupted run goes on where it stopped when the same command is given again.
    """
    from hisparse.cli.generate import check_safetensors
    from hisparse.cli.session import read_model
    from hisparse.models import context_window
    from hisparse.tlif.distill import DistillPlan
    from hisparse.tlif.distill import distill as run

    check_safetensors(output, model)
    for path in (*corpus, *(more or ()), *(held_out or ())):
        if not path.is_file():  # said at once rather than after loading a model
            raise InputError(f"corpus {path}: no such file; give the path of a text file")
    if more and held_out:  # a shell's `--held-out *.txt` would else have held-out texts learned from
        raise InputError(
            f"{more[0]}: it is unclear whether this is to learn from or held out; name each file with its own "
            "--corpus or --held-out"
        )
    plan = DistillPlan(
        corpus=(*corpus, *(more or ())),
        held_out=tuple(held_out or ()),
        label=label,
        tokens=tokens,
        chunk=chunk,
        epochs=epochs,
        seed=seed,
        prefix_length=prefix_length,
    )
    console = Console(stderr=True)
    loaded, tokenizer = read_model(model, device, dtype)
    window = context_window(loaded)
    if window is not None and chunk > window:
        raise InputError(f"chunk = {chunk}: the model {model} has {window} positions; give --chunk {window} or less")
    with _bar(console) as progress:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                announce(console, f"{stage}: {done} of {total} ...")
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        card = run(loaded, tokenizer, plan, output, _command(plan, model, output, dtype), report, restart)
    table = Table("text", "tokens", "AUC", "mean p", *(f"share >= {at}" for at in card.scores["thresholds"].values()))
    for name, scores in card.scores["held_out"].items():
        shares = (f"{scores[f'share_{key}']:.1%}" for key in card.scores["thresholds"])
        table.add_row(
            name, f"{scores['tokens']:.0f}", f"{scores['auc']:.3f}", f"{scores['mean_importance']:.3f}", *shares
        )
    console.print(table)
    console.print(f"wrote {output} ({output.stat().st_size / 1024:.0f} KiB)")


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def _command(plan: object, model: str, output: Path, dtype: str | None) -> str:
    """The command that makes this file again, without the folders of this machine."""
    from hisparse.tlif.distill import DistillPlan

    assert isinstance(plan, DistillPlan)
    words = ["hisparse", "distill", "--model", Path(model).name]
    for name, files in (("--corpus", plan.corpus), ("--held-out", plan.held_out)):
        for path in files:
            words += [name, path.name]
    for field in ("label", "tokens", "chunk", "epochs", "seed", "prefix_length"):
        words += [f"--{field.replace('_', '-')}", str(getattr(plan, field))]
    words += [] if dtype is None else ["--dtype", dtype]
    return shlex.join([*words, "-o", output.name])
