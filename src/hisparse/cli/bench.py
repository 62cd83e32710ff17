"""`hisparse bench`: how exact and how fast the cache is on this machine, beside the dense one; and its kernels."""

from __future__ import annotations

import enum
import sys
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
    Tlif,
    check_folder,
    check_writable,
    write_json,
)
from hisparse.cli.kernels import Threads, add_commands, set_threads
from hisparse.cli.progress import announce
from hisparse.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from hisparse.config import HiSparseConfig
    from hisparse.evaluate.caches import CacheFactory, HiSparseCaches
    from hisparse.evaluate.needles import NeedleContext

bench_app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure quality and speed beside the dense cache."
)
add_commands(bench_app)

Texts = Annotated[
    list[Path] | None,
    typer.Option("--text", "-f", help="Held-out UTF-8 text; may be repeated. Hamlet, fetched once, if not given."),
]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")]
Economy = Annotated[
    bool, typer.Option("--economy/--no-economy", help="Measure the same configuration with 1-bit sketches too.")
]


class Suite(enum.StrEnum):
    """What `hisparse bench quality` measures."""

    single = "single"
    multi_key = "multi_key"
    fidelity = "fidelity"


_NEEDLE_SUITES = (Suite.single, Suite.multi_key)


@bench_app.command()
def quality(
    model: Model = "default",
    text: Texts = None,
    suite: Annotated[
        list[Suite] | None, typer.Option("--suite", "-s", help="May be repeated; all three if not given.")
    ] = None,
    needle_tokens: Annotated[int, typer.Option(min=64, help="Tokens of a context with needles.")] = 2000,
    contexts: Annotated[int, typer.Option(min=1, help="Contexts of each needle suite.")] = 20,
    needles: Annotated[int, typer.Option(min=1, max=20, help="Needles in a multi_key context, all asked for.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a fidelity window, decoded ones included.")] = 7500,
    windows: Annotated[int, typer.Option(min=1, help="Fidelity windows a text.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Tokens at a window's end that are decoded singly.")] = 256,
    config: ConfigFile = None,
    economy: Economy = True,
    dense: Annotated[
        bool, typer.Option("--dense-only", help="Only the dense cache's needles: what the model itself can do.")
    ] = False,
    tlif: Tlif = None,
    calibration: Calibration = None,
    chunk: Chunk = None,
    seed: Annotated[int, typer.Option(help="Of the contexts.")] = 0,
    scratch: Annotated[
        Path | None, typer.Option(help="Folder that keeps the dense cache's logits for the next run.")
    ] = None,
    json_out: JsonOut = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
) -> None:
    """Needles found and next-token divergence, beside the dense cache on the same prompts.

    Needles: facts hidden in running text, asked for once the text is stored. Fidelity: the last tokens of a long window
    are decoded one by one and their distributions compared. Accuracy has its 95 % interval, KL is in nats.
    """
    from hisparse.cli import session

    settings = session.open_config(config)
    check_writable(json_out)
    if scratch is not None:
        check_folder("--scratch", scratch)
    suites = tuple(dict.fromkeys(suite or list(Suite)))
    if dense:
        suites = tuple(name for name in suites if name in _NEEDLE_SUITES)
        if not suites:
            raise InputError("--dense-only compares nothing in fidelity; add --suite single or --suite multi_key")
    sources = _read_texts(text)
    set_threads(threads)
    loaded, tokenizer = session.open_model(model, device, dtype)
    longest = tokens if Suite.fidelity in suites else 0
    if any(name in suites for name in _NEEDLE_SUITES):
        longest = max(longest, needle_tokens)
    session.check_window(loaded, longest, 0)

    from hisparse.evaluate.caches import DenseCaches

    caches = [] if dense else _caches(settings, economy, tlif, calibration)
    # All that the text may be too short for is made before the first suite runs: a later error would lose its results.
    cut = _cut_windows(tokenizer, sources, tokens, windows, decode) if Suite.fidelity in suites else []
    hay = "\n\n".join(sources.values())
    hidden = {
        name: _hide_needles(tokenizer, hay, name, needle_tokens, contexts, needles, seed)
        for name in suites
        if name is not Suite.fidelity
    }
    result = _header(model, loaded, sources, settings, seed=seed, chunk=chunk)
    for name in suites:
        if name is Suite.fidelity:
            result["fidelity"] = _run_fidelity(loaded, cut, caches, tokens, decode, chunk, scratch)
        else:
            kinds: list[CacheFactory] = [DenseCaches(), *caches]
            result[str(name)] = _run_needles(loaded, tokenizer, hidden[name], kinds, needle_tokens, chunk)
    _print(_quality_table(result, suites))
    if json_out is not None:
        write_json(json_out, result)


@bench_app.command()
def speed(
    model: Model = "default",
    text: Texts = None,
    tokens: Annotated[int, typer.Option(min=2, help="Context length, decoded tokens included.")] = 7500,
    decode: Annotated[int, typer.Option(min=1, help="Tokens decoded and timed singly in each run.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Paired runs, in alternating order.")] = 3,
    max_kl: Annotated[
        float, typer.Option(min=0.0, help="Refuse to give a speed if mean KL against dense is above this.")
    ] = 0.05,
    config: ConfigFile = None,
    tlif: Tlif = None,
    calibration: Calibration = None,
    chunk: Chunk = None,
    json_out: JsonOut = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
) -> None:
    """Seconds of prefill and milliseconds a decoded token, beside the dense cache in the same process.

    Both caches take turns on the same tokens. Their distributions are compared first: a cache that answers differently
    gets no speed and exit code 2. Run it on a machine that does nothing else.
    """
    from hisparse.cli import session

    settings = session.open_config(config)
    check_writable(json_out)
    sources = _read_texts(text)
    set_threads(threads)
    loaded, tokenizer = session.open_model(model, device, dtype)
    session.check_window(loaded, tokens, 0)

    from hisparse.evaluate.caches import DenseCaches
    from hisparse.evaluate.environment import environment
    from hisparse.evaluate.speed import compare_speed
    from hisparse.evaluate.texts import windows

    ours = _caches(settings, False, tlif, calibration)[0]
    window = windows(tokenizer, next(iter(sources.values())), tokens + 1, 1)[0]
    result = _header(model, loaded, sources, settings, chunk=chunk)
    with _bar("speed", 2 * rounds) as advance:
        result["speed"] = compare_speed(
            loaded,
            window,
            DenseCaches(),
            ours,
            decoded=decode,
            rounds=rounds,
            chunk=chunk,
            max_kl=max_kl,
            progress=advance,
        )
    result["environment_after"] = environment(loaded.device)
    _print(_speed_table(result["speed"], ours.name))
    if json_out is not None:
        write_json(json_out, result)


def _read_texts(paths: list[Path] | None) -> dict[str, str]:
    from hisparse.cli.session import read_text

    if paths:
        return {path.name: read_text(path) for path in paths}
    from hisparse.books import book

    return {"hamlet.txt": book()}


def _caches(
    settings: HiSparseConfig, economy: bool, tlif: Path | None, calibration: Path | None
) -> list[HiSparseCaches]:
    """The configuration under test and, beside it, the same one with 1-bit sketches unless it has them already."""
    from hisparse.evaluate.caches import HiSparseCaches

    for option, path in (("--tlif", tlif), ("--calibration", calibration)):
        if path is not None and not path.is_file():
            raise InputError(f"{option} {path}: no such file; leave the option out to use what ships with HiSparse")
    caches = [HiSparseCaches(settings, "hisparse", tlif, calibration)]
    if economy and settings.selection.sketch_bits != 1:
        selection = settings.selection.model_copy(update={"sketch_bits": 1})
        lean = settings.model_copy(update={"selection": selection})
        caches.append(HiSparseCaches(lean, "economy", tlif, calibration))
    return caches


def _header(name: str, model: Any, sources: dict[str, str], settings: HiSparseConfig, **more: Any) -> dict[str, Any]:
    import hashlib

    from hisparse.evaluate.environment import environment

    return {
        "model": name,
        "architecture": model.config.get_text_config(decoder=True).model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "texts": {key: hashlib.sha256(value.encode()).hexdigest()[:16] for key, value in sources.items()},
        "config": settings.model_dump(mode="json"),
        **more,
        "environment": environment(model.device),
    }


def _cut_windows(tokenizer: Any, sources: dict[str, str], tokens: int, count: int, decode: int) -> list[Tensor]:
    """Windows of `tokens` and the token that follows, int64 [1, tokens + 1] each. Raises InputError where a text is too
    short for them, or they for `decode`."""
    from hisparse.evaluate.fidelity import check_decoded
    from hisparse.evaluate.texts import windows

    check_decoded(tokens, decode)
    cut = []
    for name, text in sources.items():
        try:
            cut += windows(tokenizer, text, tokens + 1, count)
        except InputError as error:
            raise InputError(f"--text {name}, --tokens {tokens}: {error}") from None
    return cut


def _hide_needles(
    tokenizer: Any, hay: str, name: Suite, tokens: int, count: int, needles: int, seed: int
) -> list[NeedleContext]:
    from hisparse.evaluate.needles import Kind, build_contexts

    kind: Kind = "single" if name is Suite.single else "multi_key"
    return build_contexts(tokenizer, hay, kind, tokens, count, needles=needles, seed=seed)


def _run_needles(
    model: Any,
    tokenizer: Any,
    contexts: list[NeedleContext],
    kinds: list[CacheFactory],
    tokens: int,
    chunk: int | None,
) -> dict[str, Any]:
    from hisparse.evaluate.retrieval import retrieve

    with _bar(contexts[0].kind, len(contexts) * len(kinds)) as advance:
        found = retrieve(model, tokenizer, contexts, kinds, chunk=chunk, progress=advance)
    baseline, *others = found
    return {
        "tokens": tokens,
        "contexts": len(contexts),
        "needles": len(contexts[0].needles),
        baseline.name: baseline.to_json(),
        **{other.name: other.to_json(baseline) for other in others},
    }


def _run_fidelity(
    model: Any,
    cut: list[Tensor],
    caches: list[HiSparseCaches],
    tokens: int,
    decode: int,
    chunk: int | None,
    scratch: Path | None,
) -> dict[str, Any]:
    from hisparse.evaluate.fidelity import fidelity

    with _bar("fidelity", len(cut) * (1 + len(caches))) as advance:
        found = fidelity(model, cut, caches, decode, chunk=chunk, scratch=scratch, progress=advance)
    return {"tokens": tokens, "decoded": decode, "windows": len(cut), **found}


class _bar:  # noqa: N801 - used like a function
    """A progress bar on stderr; entering gives the function that moves it on by one."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total = title, total
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=Console(file=sys.stderr))
        self.task = self.progress.add_task(title, total=total)

    def __enter__(self) -> Any:
        announce(self.progress.console, f"{self.title}: {self.total} runs ...")
        self.progress.start()
        return lambda: self.progress.advance(self.task)

    def __exit__(self, *_: object) -> None:
        self.progress.stop()


def _print(table: Table) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)


def _quality_table(result: dict[str, Any], suites: tuple[Suite, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("suite", "cache", "result", "against dense", "KV capacity"):
        table.add_column(column)
    for suite in suites:
        data = result[str(suite)]
        for name, found in data.items():
            if not isinstance(found, dict):
                continue
            if suite is Suite.fidelity:
                what = (
                    f"KL mean {found['mean_kl']:.4f}, max {found['max_kl']:.3f}; argmax {found['argmax_agreement']:.3f}"
                )
                beside = f"perplexity {found['perplexity']:.3f}, ratio {found['perplexity_ratio']:.4f}"
                table.add_row(str(suite), name, what, beside, f"{found['capacity_min']:.2f}")
                continue
            low, high = found["accuracy_95"]
            what = f"{found['correct']}/{found['questions']} = {found['accuracy']:.3f} [{low:.3f}, {high:.3f}]"
            beside = ""
            if pair := found.get("against_dense"):
                low, high = pair["difference_95"]
                beside = (
                    f"lost {pair['lost']}, gained {pair['gained']}; {pair['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
                )
            table.add_row(str(suite), name, what, beside, f"{found['capacity_mean']:.2f}")
    return table


def _speed_table(data: dict[str, Any], ours: str) -> Table:
    from rich.table import Table

    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold",
        caption=f"{data['tokens']} tokens, {data['rounds']} paired rounds; mean KL {data['check']['mean_kl']:.4f}",
    )
    for column in ("", "dense", ours, "ratio (least, greatest)"):
        table.add_column(column)
    for title, key, ratio in (
        ("prefill, s", "prefill_seconds", "prefill"),
        ("decode, ms/token", "decode_ms", "decode"),
    ):
        factor = data["ratio"][ratio]
        spread = f"{factor['median']:.2f} ({factor['min']:.2f}, {factor['max']:.2f})"
        table.add_row(title, f"{data['dense'][key]:.2f}", f"{data[ours][key]:.2f}", spread)
    return table
