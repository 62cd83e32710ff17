"""`hisparse plan-blocks`: the block plan of a text, of an importance file or of synthetic importance, and a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hisparse.cli.generate import check_picture, check_writable
from hisparse.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from hisparse.blgs import BlockPlan
    from hisparse.config import HiSparseConfig

_CHANNELS = 512  # 4 KV heads of 128, where no model says otherwise
_PIECE = 2048  # tokens whose value rows are computed at a time


def plan_blocks_command(
    importance: Annotated[
        Path | None, typer.Option("--importance", help="Importance, one value a token: .npy or .safetensors.")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text file, scored with --model.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Synthetic importance of this many tokens.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the synthetic importance.")] = 0,
    model: Annotated[str, typer.Option("--model", "-m", help="For --text: default, directory, .gguf or hub id.")] = (
        "default"
    ),
    tlif: Annotated[
        Path | None, typer.Option("--tlif", help="For --text: file that `hisparse distill` made for this model.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="hi-sparse-config.json; all keys optional.")
    ] = None,
    channels: Annotated[
        int | None, typer.Option("--channels", min=1, help="Channels of a layer's K: KV heads x head size.")
    ] = None,
    keep_limit: Annotated[int | None, typer.Option("--keep-limit", min=0, help="Most tokens that may be kept.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the plan into this file.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the plan to this file.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Recount everything, and print the arithmetic.")] = False,
) -> None:
    """Plan blocks from importance alone, without running attention, and compare them with fixed blocks."""
    from rich.console import Console

    from hisparse.blgs import draw_plan, plan_blocks
    from hisparse.config import HiSparseConfig

    settings = HiSparseConfig() if config is None else HiSparseConfig.load(config)
    check_picture(png)
    check_writable(json_out)
    given = [name for name, value in (("--importance", importance), ("--text", text), ("--tokens", tokens)) if value]
    if tokens == 0 and not given:
        given = ["--tokens"]
    if len(given) != 1:
        raise InputError(f"{' and '.join(given) or 'no input'} given; give one of --importance, --text or --tokens")
    if importance is not None:
        p = read_importance(importance)
    elif text is not None:
        p, channels = score_text(text, model, tlif, settings)
    else:
        from hisparse.blgs import synthetic_importance

        p = synthetic_importance(tokens or 0, seed)
    threshold = settings.tlif.threshold(p.shape[0])
    plan = plan_blocks(p, threshold, settings.blgs, channels or _CHANNELS, keep_limit)
    out = Console(highlight=False)
    out.print(blocks_table(plan, threshold))
    out.print()
    out.print(coverage_table(plan, p))
    if check:
        plan.check_integrity()
    if png is not None:
        draw_plan(plan, png, p)
        print(f"plan: {png}", file=sys.stderr)
    if json_out is not None:
        try:
            json_out.write_text(plan.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--json {json_out}: {error.strerror}; give a file that can be written") from None


def read_importance(path: Path) -> Tensor:
    """Importance float [T] from a .npy file or a .safetensors file whose only tensor, or tensor `importance`, it is.

    Raises InputError for a file that is missing, of another kind, damaged, or ambiguous.
    """
    import numpy as np
    import torch

    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False).copy())
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            try:
                tensors: dict[str, Tensor] = load_file(path)
            except SafetensorError as error:
                raise ValueError(str(error)) from None
            if len(tensors) == 1:
                return next(iter(tensors.values()))
            if "importance" in tensors:
                return tensors["importance"]
            raise ValueError(f"holds {len(tensors)} tensors, none of them named importance")
    except (OSError, ValueError, TypeError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"importance file {path}: {reason}; give a .npy or .safetensors file with one float value a token"
        ) from None
    raise InputError(f"importance file {path}: unknown kind {path.suffix!r}; give a .npy or .safetensors file")


def score_text(path: Path, model: str, tlif: Path | None, settings: HiSparseConfig) -> tuple[Tensor, int]:
    """Importance float32 [T] of a text's tokens by the model's scorer, and the channels of one layer's K.

    Only the embedding and layer 0's value projection run, so texts far longer than the model's window can be planned.
    """
    import torch

    from hisparse.cli.session import build_prompt, read_text
    from hisparse.identity import ModelIdentity
    from hisparse.models import load_model
    from hisparse.models.bars import without_bars
    from hisparse.tlif import scorer_for
    from hisparse.tlif.labels import layer0_values

    content = read_text(path)
    with without_bars():
        loaded, tokenizer = load_model(model)
    settings.check_hidden_size(loaded.config.get_text_config(decoder=True).hidden_size)
    ids = build_prompt(tokenizer, content).document[0]
    identity = ModelIdentity.of(loaded)
    scorer = scorer_for(identity, settings.tlif, tlif)
    state, parts = None, []
    for start in range(0, ids.shape[0], _PIECE):  # a value row depends on its own token alone
        piece = ids[start : start + _PIECE]
        part, state = scorer.score(layer0_values(loaded, piece), state)
        parts.append(part)
    return torch.cat(parts), identity.value_features


def blocks_table(plan: BlockPlan, threshold: float) -> Table:
    """By block length: blocks, tiles, tokens covered and kept, density."""
    from rich.table import Table

    table = Table(title=f"{plan.length:,} tokens, {len(plan.modes):,} modes, {plan.n_anchors:,} anchors")
    for column in ("length", "width", "blocks", "tiles", "tokens", "kept", "density"):
        table.add_column(column, justify="right")
    for level in sorted(set(plan.level.tolist())):
        here = plan.level == level
        width = int(plan.channel_width[here][0])
        blocks, tokens, kept = int(here.sum()), int(plan.tokens[here].sum()), int(plan.kept[here].sum())
        counts = (plan.min_block_size << level, width, blocks, blocks * -(-plan.channels // width), tokens, kept)
        table.add_row(*(f"{count:,}" for count in counts), f"{kept / tokens:.2%}")
    table.add_section()
    totals: tuple[Any, ...] = (plan.n_blocks, plan.n_tiles, plan.length, plan.n_kept)
    table.add_row("all", "", *(f"{count:,}" for count in totals), f"{plan.density:.2%}", style="bold")
    limited = f", {plan.demoted:,} more given up for the limit" if plan.demoted else ""
    table.caption = f"anchors: importance >= {threshold:.3f}{limited}; {plan.channels} channels a layer"
    return table


def coverage_table(plan: BlockPlan, importance: Tensor) -> Table:
    """Importance covered by the plan and by the alternatives."""
    from rich.table import Table

    from hisparse.blgs.compare import compare

    found = compare(plan, importance)
    table = Table(title="Share of all importance that the kept tokens hold")
    for column in ("choice", "kept", "importance"):
        table.add_column(column, justify="left" if column == "choice" else "right")
    names = {
        "plan": "this plan",
        "fixed": "whole 64-token blocks, as many tokens",
        "fixed, equal mass": "whole 64-token blocks, as much importance",
        "tokens": "single tokens, as many (the ceiling)",
        "chance": "chance, as many",
    }
    for key, name in names.items():
        table.add_row(name, f"{found[key].kept:,}", f"{found[key].mass:.2%}")
    return table
