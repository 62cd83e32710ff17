"""`hisparse inspect-kv-cache`: what is kept of a text, by layer and tier, how dense the blocks are, and a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hisparse.cli.generate import (
    Calibration,
    Chunk,
    ConfigFile,
    Device,
    Dtype,
    Model,
    PromptFile,
    Tlif,
    check_picture,
    check_writable,
    size,
    write_json,
)

if TYPE_CHECKING:
    from rich.table import Table

    from hisparse.integrations.transformers import HiSparseCache


def inspect_kv_cache(
    prompt_file: PromptFile,
    model: Model = "default",
    config: ConfigFile = None,
    tlif: Tlif = None,
    calibration: Calibration = None,
    chunk: Chunk = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the block plan into this file.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the tables to this file.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Recount everything, and print the arithmetic.")] = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Store a text and show what is kept of it: bytes by layer and tier, tokens, blocks and their density."""
    from rich.console import Console

    from hisparse.cli import session

    text = session.read_text(prompt_file)
    settings = session.open_config(config)
    check_writable(json_out)
    check_picture(png)
    loaded, tokenizer = session.open_model(model, device, dtype)
    prompt = session.build_prompt(tokenizer, text, None, loaded.device)
    session.check_window(loaded, prompt.length, 0)
    cache = session.open_cache(loaded, settings, tlif, calibration, keep_plans=True)
    session.prefill(loaded, prompt.document, cache, chunk or settings.prefill.chunk)
    data = describe(cache)
    out = Console(highlight=False)
    for table in (tiers_table(data), tokens_table(data), blocks_table(data)):
        out.print(table)
        out.print()
    if check:
        out.print(cache.check_integrity())
    if png is not None:
        draw(cache, png)
        print(f"plan: {png}", file=sys.stderr)
    if json_out is not None:
        write_json(json_out, {"model": model, **data})


def describe(cache: HiSparseCache) -> dict[str, Any]:
    """Everything the tables show: `layers` (bytes by tier), `shared` bytes, `tokens`, `blocks` by length, `capacity`.

    A block is counted once here, over all its channels; the report's count has one for every channel tile.
    """
    report = cache.report()
    stores = [(index, getattr(layer, "store", None)) for index, layer in enumerate(cache.layers)]
    layers = [
        {"layer": index, **store.device_bytes(), "host": store.host_bytes()}
        for index, store in stores
        if store is not None
    ]
    per_layer = {name for layer in layers for name in layer}
    return {
        "capacity": report.capacity,
        "dense_bytes": report.dense_bytes,
        "gpu_bytes": report.gpu_bytes,
        "host_bytes": report.host_bytes,
        "layers": layers,
        "shared": {name: count for name, count in report.device.items() if name not in per_layer},
        "tokens": dict(report.tokens),
        "blocks": block_density([plan for planner in cache.planners for _, plan, _ in planner.plans]),
        "tiles": report.blocks,
    }


def block_density(plans: Sequence[Any]) -> list[dict[str, Any]]:
    """By block length: number of blocks, tokens covered, tokens kept, and density (kept / covered)."""
    counts: dict[int, list[int]] = {}
    for plan in plans:
        rows = zip(plan.level.tolist(), plan.tokens.tolist(), plan.kept.tolist(), strict=True)
        for level, tokens, kept in rows:
            entry = counts.setdefault(plan.min_block_size << level, [0, 0, 0])
            entry[0] += 1
            entry[1] += tokens
            entry[2] += kept
    return [
        {"length": length, "blocks": n, "tokens": tokens, "kept": kept, "density": kept / tokens if tokens else 0.0}
        for length, (n, tokens, kept) in sorted(counts.items())
    ]


def tiers_table(data: dict[str, Any]) -> Table:
    """Bytes by layer and tier."""
    from rich.table import Table

    tiers = [name for name in data["layers"][0] if name != "layer"] if data["layers"] else []
    table = Table(title=f"KV cache by layer: {size(data['gpu_bytes'])} on the device, capacity x{data['capacity']:.2f}")
    table.add_column("layer", justify="right")
    for name in tiers:
        table.add_column(name, justify="right")
    for numbers, sizes in _runs([(layer["layer"], tuple(layer[name] for name in tiers)) for layer in data["layers"]]):
        label = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]} (each)"
        table.add_row(label, *(size(count) for count in sizes))
    table.add_section()
    table.add_row("all", *(size(sum(layer[name] for layer in data["layers"])) for name in tiers), style="bold")
    shared = ", ".join(f"{name.replace('_', ' ')} {size(count)}" for name, count in data["shared"].items())
    table.caption = f"shared by all layers: {shared}; dense bf16 cache: {size(data['dense_bytes'])}"
    return table


def _runs(rows: list[tuple[int, tuple[int, ...]]]) -> list[tuple[list[int], tuple[int, ...]]]:
    """Neighbouring layers of equal sizes as one row: ([layers], sizes)."""
    runs: list[tuple[list[int], tuple[int, ...]]] = []
    for number, sizes in rows:
        if runs and runs[-1][1] == sizes:
            runs[-1][0].append(number)
        else:
            runs.append(([number], sizes))
    return runs


def tokens_table(data: dict[str, Any]) -> Table:
    """Where the tokens are."""
    from rich.table import Table

    tokens = data["tokens"]
    table = Table(title="Tokens")
    for column in ("where", "tokens", "share"):
        table.add_column(column, justify="left" if column == "where" else "right")
    for name in ("dense", "kept", "set_aside", "dropped"):
        table.add_row(name.replace("_", " "), str(tokens[name]), f"{tokens[name] / max(tokens['total'], 1):.1%}")
    table.add_section()
    table.add_row("all", str(tokens["total"]), "", style="bold")
    table.caption = f"anchors, always kept: {tokens['anchors']}"
    return table


def blocks_table(data: dict[str, Any]) -> Table:
    """How dense blocks of each length are."""
    from rich.table import Table

    table = Table(title=f"Blocks by length, {data['tiles']} tiles in all")
    for column in ("length", "blocks", "tokens", "kept", "density"):
        table.add_column(column, justify="right")
    for row in data["blocks"]:
        numbers = (row["length"], row["blocks"], row["tokens"], row["kept"])
        table.add_row(*(str(number) for number in numbers), f"{row['density']:.1%}")
    table.caption = "near anchors short and dense, far from them long and sparse"
    return table


def draw(cache: HiSparseCache, path: Path) -> None:
    """Draw the plan of the longest stretch that was planned in one go."""
    from hisparse.blgs import draw_plan
    from hisparse.errors import InputError

    plans = [entry for planner in cache.planners for entry in planner.plans]
    if not plans:
        raise InputError(
            "nothing to draw: the text is so short that all of it lies in the dense tail; take a longer one"
        )
    first, plan, importance = max(plans, key=lambda entry: entry[1].length)
    draw_plan(plan, path, importance=importance, first=first)
