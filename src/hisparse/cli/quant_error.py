"""`hisparse bench-quant-error`: the quantisation error of every block of a text, all rules side by side, worst
first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench_quant_error(
    text: Annotated[Path, typer.Option("--text", help="UTF-8 text to measure on.")],
    model: Annotated[str, typer.Option("--model", help="Model name, directory, GGUF file or hub id.")] = "default",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text to use.")] = 2048,
    skip: Annotated[int, typer.Option(min=0, help="Characters of the text to skip before.")] = 0,
    queries: Annotated[int, typer.Option(min=1, max=128, help="Queries sampled from the last 128 positions.")] = 16,
    worst: Annotated[int, typer.Option(min=0, help="Blocks to list.")] = 15,
    config: Annotated[Path | None, typer.Option("--config", help="hi-sparse-config.json.")] = None,
    calibration: Annotated[Path | None, typer.Option("--calibration", help="Calibration file.")] = None,
    kl: Annotated[bool, typer.Option("--kl/--no-kl", help="Compare next-token distributions too.")] = True,
    json: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Pack every block of a text under each rule and show the errors by block, worst first."""
    from json import dumps

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from hisparse.cli.generate import check_writable
    from hisparse.cli.progress import phase
    from hisparse.cli.session import read_text
    from hisparse.config import HiSparseConfig
    from hisparse.errors import InputError
    from hisparse.identity import ModelIdentity
    from hisparse.models import context_window, load_model
    from hisparse.models.bars import without_bars
    from hisparse.vtq.calibration import calibration_for
    from hisparse.vtq.report import quantisation_report

    settings = (HiSparseConfig() if config is None else HiSparseConfig.load(config)).vtq
    check_writable(json)
    content = read_text(text)[skip : skip + 12 * tokens]
    with without_bars():
        network, tokenizer = load_model(model)
    window = context_window(network)
    if window is not None and tokens > window:
        raise InputError(f"tokens = {tokens} is more than the model's window of {window}; use at most {window}")
    stats = calibration_for(ModelIdentity.of(network), calibration)
    ids = tokenizer(content, return_tensors="pt", verbose=False)["input_ids"][0, :tokens]
    console = Console()
    with phase() as say:
        report = quantisation_report(network, ids, settings, stats, queries=queries, kl=kl, progress=say)

    where = "calibrated" if report.calibrated else "no calibration file: first 512 tokens"
    title = f"{report.rules[0].k.numel()} blocks of {report.page_size} tokens x one KV head, {len(ids)} tokens, {where}"
    # A column a rule and a row a figure: eleven columns of figures would not fit a terminal of 80.
    table = Table("", title=title)
    summaries = [errors.summary() for errors in report.rules]
    for s in summaries:
        table.add_column(s["rule"], justify="right", no_wrap=True)
    figures = [("bits a value", "bits", ".2f"), ("K error", "k_error", ".4f"), ("V error", "v_error", ".4f")]
    figures += [(f"block {part}", f"attention_error_{part}", ".5f") for part in ("mean", "p99", "max")]
    figures += [("blocks > 0.02", "blocks_above_0.02", ".2%"), ("all packed", "output_error", ".4f")]
    figures += [("split", "split_share", ".0%"), ("us a block", "pack_us_per_block", ".1f")]
    for name, key, form in [*figures, *([("KL", "kl", ".5f")] if kl else [])]:
        table.add_row(name, *(format(s[key], form) for s in summaries))
    console.print(table)
    if worst:
        # Ten columns in a terminal of 80: without borders between them.
        title = f"Worst blocks under {report.rules[0].rule.name} (relative error of the attention output)"
        blocks = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        names = [errors.rule.name for errors in report.rules]
        for name in ("layer", "head", "tokens", "K error", "V error", *names):
            blocks.add_column(name.replace(" ", "\n"), justify="right", no_wrap=name == "tokens")
        for row in report.worst(worst):
            cells = [str(row["layer"]), str(row["head"]), "{}-{}".format(*row["tokens"])]
            cells += [f"{row['k_error']:.4f}", f"{row['v_error']:.4f}"]
            blocks.add_row(*cells, *(f"{row['attention_error'][name]:.4f}" for name in names))
        console.print(blocks)
    if json is not None:
        try:
            json.write_text(dumps(report.to_dict(worst), indent=1), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--json {json}: cannot be written ({error.strerror}); choose another path") from None
