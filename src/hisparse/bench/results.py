"""The results file: one a card and day, to which every bench adds its rows."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from hisparse.errors import InputError

KEY = ("bench", "shape", "context", "batch", "what")
"""What makes two rows the same measurement: the newer takes the older one's place."""


def make_row(bench: str, shape: str, context: int, ms: float, **others: Any) -> dict[str, Any]:
    """A row with every field of the file; those that a bench does not know are null."""
    fields = ("capacity", "dense_ms", "speedup", "bytes", "bandwidth_fraction", "error")
    row: dict[str, Any] = {"bench": bench, "shape": shape, "context": context, "batch": 1, "ms": round(ms, 5)}
    row = {**row, **dict.fromkeys(fields), **others}
    if row["dense_ms"] is not None:
        row["speedup"] = round(row["dense_ms"] / ms, 3)
        row["dense_ms"] = round(row["dense_ms"], 5)
    if row["error"] is not None:
        row["error"] = float(f"{row['error']:.2e}")
    return row


def device_name() -> str:
    """What the file calls this machine: the GPU, or `cpu`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def results_path(folder: Path) -> Path:
    """`<gpu>-<date>.json` in `folder`."""
    gpu = device_name().replace("NVIDIA ", "").replace(" ", "-").lower()
    return folder / f"{gpu}-{datetime.date.today()}.json"


def commit_name() -> str:
    """The commit of the source tree, `+` where it has changed since; empty where there is no git or no tree."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        state = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if state.stdout.strip() else "")


def read_results(path: Path) -> dict[str, Any]:
    """A results file, or an empty one where there is none yet. Raises InputError for any other file."""
    if not path.exists():
        return {"rows": []}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"no JSON: {error}"
    else:
        rows = found.get("rows") if isinstance(found, dict) else None
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return dict(found)
        reason = "no object with a list of rows"
    raise InputError(
        f"--out {path}: no results file ({reason}); give one that `hisparse bench` wrote, a new name or a folder"
    )


def save(rows: list[dict[str, Any]], path: Path, commit: str, **speeds: float) -> None:
    """Merge `rows` into the file. `speeds`: the card's bandwidths in bytes a second. Raises InputError for a file that
    is no results file, or cannot be written."""
    old = read_results(path)
    new = {_key(row) for row in rows}
    kept = [row for row in old["rows"] if _key(row) not in new]
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = ""
    head = {"gpu": device_name(), "torch": torch.__version__, "triton": triton_version, "commit": commit}
    measured = {
        **{k: v for k, v in old.items() if k.endswith("_bandwidth")},
        **{k: round(v) for k, v in speeds.items()},
    }
    # A row says which commit it was measured at where that is not the file's newest.
    before = old.get("commit", "")
    kept = [row if before == commit or "commit" in row else {**row, "commit": before} for row in kept]
    lines = ",\n".join("  " + json.dumps(row) for row in kept + rows)
    text = json.dumps({**head, **measured})[:-1] + ',\n "rows": [\n' + lines + "\n]}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error}); give another path with --out") from None


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(repr(row.get(name)) for name in KEY)
