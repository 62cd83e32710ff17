"""`hisparse bench decode|prefill|pack|plan|tlif|...`: how fast the kernels are on this card."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch


def check_results(out: Path | None) -> Path | None:
    """The results file that --out means. Raises InputError, before anything is measured, for what is none."""
    if out is None:
        return None
    from hisparse.bench.results import read_results, results_path
    from hisparse.cli.generate import check_folder, check_writable

    path = out if out.suffix == ".json" else results_path(out)
    check_folder("--out", path.parent)
    check_writable(path)
    read_results(path)
    return path


Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", "-s", help="Attention shape of a model; may be repeated. glm4-9b-1m if not given."),
]
Contexts = Annotated[list[int] | None, typer.Option("--context", "-c", min=1024, help="Tokens; may be repeated.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        callback=check_results,
        help="Results file or folder (then <gpu>-<date>.json in it); rows are merged into it.",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, max=1024, help="CPU threads; PyTorch's choice if not given.")
]
Commit = Annotated[str | None, typer.Option("--commit", help="Commit to name in the results; git's if not given.")]
TwinName = Annotated[
    str | None, typer.Option("--twin", help="Kernel to measure: triton or cuda; the one in use if not given.")
]


def set_threads(threads: int | None) -> None:
    """Let PyTorch use so many threads of the CPU; None leaves it its own choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def add_commands(app: typer.Typer) -> None:
    """Add a command for each kernel benchmark."""
    for command in (decode, prefill, recall, sketch, pack, plan, tlif):
        app.command()(command)


def decode(
    shape: Shapes = None,
    context: Contexts = None,
    page_size: Annotated[list[int] | None, typer.Option(help="Tokens a page; may be repeated.")] = None,
    group: Annotated[int, typer.Option(help="Channels that share a step and a zero.")] = 64,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="Settings of the kernel to try, comma-separated in the order of its Tuning; may be repeated."
        ),
    ] = None,
    twin: TwinName = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Decode attention over packed pages on the device, beside dense attention of the same tokens."""
    device = _cuda("decode")
    from hisparse.bench import decode as bench
    from hisparse.bench.measure import read_bandwidth

    speeds = {"read_bandwidth": read_bandwidth(device)}
    sizes, contexts = _page_sizes(page_size, [4, 8]), context or [1 << 17, 1 << 20]
    rows = (
        row
        for name in _shapes(shape)
        for size in sizes
        for row in bench.run(name, contexts, size, group, device, speeds["read_bandwidth"], twin, tune or [])
    )
    _report(rows, out, commit, speeds)


def prefill(
    shape: Shapes = None,
    context: Contexts = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of the chunk.")] = 8192,
    capacity: Annotated[float, typer.Option(min=1.0, help="KV capacity: dense bytes / device bytes.")] = 9.1,
    budget: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Rows a chunk recalls, in multiples of a decode step's; may be repeated."),
    ] = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """A chunk over a long past, most of it in host memory: all of it, and recalled rows only; beside dense flash."""
    device = _cuda("prefill")
    from hisparse.bench import prefill as bench
    from hisparse.bench.measure import pinned_bandwidth

    speeds = {"pinned_bandwidth": pinned_bandwidth(device)}
    rows = (
        row
        for name in _shapes(shape)
        for tokens in context or [1 << 17]
        for row in bench.run(name, tokens, chunk, capacity, device, speeds["pinned_bandwidth"], budget or [1, 4])
    )
    _report(rows, out, commit, speeds)


def recall(
    shape: Shapes = None,
    context: Contexts = None,
    capacity: Annotated[
        list[float] | None, typer.Option(min=1.0, help="KV capacity: dense bytes / device bytes; may be repeated.")
    ] = None,
    bits: Annotated[list[int] | None, typer.Option(help="Bits of the sketches, 1 or 2; may be repeated.")] = None,
    page_size: Annotated[list[int] | None, typer.Option(help="Kept tokens a page; may be repeated.")] = None,
    scan_interval: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sketches are scanned every so many steps; may be repeated. 1 and 2 if not given."),
    ] = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """A whole decode step with recall, rows on the host: scan, select, fetch, attend; and steps between two scans."""
    device = _cuda("recall")
    from hisparse.bench import recall as bench
    from hisparse.bench.measure import pinned_bandwidth, read_bandwidth
    from hisparse.config import GPU_PAGE

    sizes, every = _page_sizes(page_size, [GPU_PAGE]), scan_interval or [1, 2]
    read, pinned = read_bandwidth(device), pinned_bandwidth(device)
    speeds = {"read_bandwidth": read, "pinned_bandwidth": pinned}
    rows = (
        row
        for name in _shapes(shape)
        for tokens in context or [1 << 17, 1 << 20]
        for row in bench.run(
            name, tokens, capacity or [9.1], bits or [2], sizes, every, device, read, pinned, typer.echo
        )
    )
    _report(rows, out, commit, speeds)


def sketch(
    shape: Shapes = None,
    context: Contexts = None,
    tune: Annotated[bool, typer.Option("--tune", help="Try other settings of the kernel.")] = False,
    twin: TwinName = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Building sketches, scanning them, and selecting rows, beside dense attention."""
    device = _cuda("sketch")
    from hisparse.bench import sketch as bench
    from hisparse.bench.measure import read_bandwidth

    speeds = {"read_bandwidth": read_bandwidth(device)}
    rows = (
        row
        for name in _shapes(shape)
        for tokens in context or [1 << 17, 1 << 20]
        for row in bench.run(name, tokens, device, speeds["read_bandwidth"], twin, tune)
    )
    _report(rows, out, commit, speeds)


def pack(
    shape: Shapes = None,
    context: Contexts = None,
    tune: Annotated[bool, typer.Option("--tune", help="Try the Triton kernel's variants.")] = False,
    twin: TwinName = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Packing and unpacking K and V."""
    device = _cuda("pack")
    from hisparse.bench import pack as bench
    from hisparse.bench.measure import copy_bandwidth, read_bandwidth

    speeds = {"read_bandwidth": read_bandwidth(device), "copy_bandwidth": copy_bandwidth(device)}
    rows = (
        row
        for name in _shapes(shape)
        for tokens in context or [1 << 20]
        for row in bench.run(name, tokens, device, speeds["read_bandwidth"], twin, tune)
    )
    _report(rows, out, commit, speeds)


def plan(
    shape: Shapes = None,
    context: Contexts = None,
    threads: Threads = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Planning the blocks of a sequence, on the CPU and, where there is one, on the GPU."""
    import torch

    from hisparse.bench import plan as bench

    set_threads(threads)
    devices = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
    rows = (
        row for name in _shapes(shape) for tokens in context or [1 << 20] for row in bench.run(name, tokens, devices)
    )
    _report(rows, out, commit, {})


def tlif(
    shape: Shapes = None,
    context: Contexts = None,
    threads: Threads = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Scoring a prompt's tokens, as a share of one layer's dense prefill attention (on a GPU)."""
    import torch

    from hisparse.bench import tlif as bench

    set_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = (
        row for name in _shapes(shape) for tokens in context or [1 << 17] for row in bench.run(name, tokens, device)
    )
    _report(rows, out, commit, {})


def _cuda(bench: str) -> torch.device:
    from hisparse.bench.measure import require_cuda

    return require_cuda(bench)


def _page_sizes(sizes: list[int] | None, default: list[int]) -> list[int]:
    """Tokens a page that the benchmarks' contexts can be cut into. Raises InputError for others."""
    from hisparse.errors import InputError

    for size in sizes or default:
        if size < 1 or 64 % size:
            raise InputError(f"--page-size {size}: use a power of two up to 64")
    return sizes or default


def _shapes(names: list[str] | None) -> list[str]:
    from hisparse.bench.shapes import shape_of

    chosen = names or ["glm4-9b-1m"]
    for name in chosen:
        shape_of(name)
    return chosen


def _report(rows: Iterable[dict[str, Any]], out: Path | None, commit: str | None, speeds: dict[str, float]) -> None:
    """Print every row as it comes, then merge all into the results file. Rows measured before an error are kept."""
    from hisparse.bench.results import commit_name, save

    for name, value in speeds.items():
        typer.echo(f"{name.replace('_', ' ')}: {value / 1e12:.3f} TB/s")
    done: list[dict[str, Any]] = []
    try:
        for row in rows:
            done.append(row)
            typer.echo(_line(row))
    finally:
        if out is not None and done:
            save(done, out, commit_name() if commit is None else commit, **speeds)
            typer.echo(f"written to {out}")


def _line(row: dict[str, Any]) -> str:
    text = f"{row['bench']} {row['shape']} {row['context']}"
    if row.get("what"):
        text += f", {row['what']}"
    text += f": {row['ms']:.4f} ms"
    if row["dense_ms"] is not None:
        text += f", dense {row['dense_ms']:.4f}: {row['speedup']:.2f} x"
    if row["bandwidth_fraction"] is not None:
        text += f", {100 * row['bandwidth_fraction']:.0f} % of read bandwidth"
    shown = {"bench", "shape", "context", "batch", "what", "ms", "dense_ms", "speedup", "bandwidth_fraction", "bytes"}
    others = {key: value for key, value in row.items() if key not in shown and value is not None}
    return text + "".join(f"; {key.replace('_', ' ')} {value}" for key, value in others.items())
