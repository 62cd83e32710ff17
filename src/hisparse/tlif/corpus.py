"""Windows of tokens drawn from text files, the same for the same files and arguments."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import InputError


@dataclass(frozen=True)
class Window:
    """ids int64 [T], and the name of the file they come from."""

    source: str
    ids: Tensor


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hex; InputError where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"corpus {path}: cannot be read ({error.strerror}); give the path of a text file") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"corpus {path}: cannot be read ({error.strerror}); give the path of a text file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"corpus {path}: not UTF-8 at byte {error.start}; convert it to plain text first") from None


def draw_windows(tokenizer: Any, files: list[Path], count: int, length: int, seed: int) -> list[Window]:
    """At most `count` windows of `length` tokens, in turn from each file, evenly spread over it from a seeded offset.

    Windows do not overlap: short files give fewer, longer ones do not make up for them. The tokenizer's
    beginning-of-text token, where it has one, opens each window, since models lean on it as their attention sink.
    Raises InputError for an unreadable file, or where no file holds a window.
    """
    generator = torch.Generator().manual_seed(seed)
    shares = [count // len(files) + (index < count % len(files)) for index in range(len(files))]
    drawn = [_from_file(tokenizer, path, share, length, generator) for path, share in zip(files, shares, strict=True)]
    windows = [
        Window(path.name, ids[turn])
        for turn in range(max(map(len, drawn)))
        for path, ids in zip(files, drawn, strict=True)
        if turn < len(ids)
    ]
    if not windows:
        raise InputError(
            f"corpus {', '.join(map(str, files))}: no file holds {length} tokens; give longer texts or "
            "a smaller --chunk"
        )
    return windows


def _from_file(tokenizer: Any, path: Path, count: int, length: int, generator: torch.Generator) -> list[Tensor]:
    text = _read(path)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    offset = float(torch.rand((), generator=generator))
    if not count:
        return []
    probe = text[: 1 << 16]
    tokens_per_character = max(len(tokenizer.encode(probe, add_special_tokens=False)), 1) / max(len(probe), 1)
    count = min(count, max(1, int(len(text) * tokens_per_character / length)))
    pitch = len(text) / count
    found = []
    for index in range(count):
        start, stop = (int((index + edge) * pitch) for edge in (0, 1))
        # Read a little more than a window needs, from a seeded place in the window's own stretch of the text.
        need = min(stop - start, int(1.3 * length / tokens_per_character) + 64)
        start += int(offset * (stop - start - need))
        ids = tokenizer.encode(text[start : start + need], add_special_tokens=False)
        if len(ids) < length - len(begin) and need < stop - start:  # denser text than the probe promised
            ids = tokenizer.encode(text[start:stop], add_special_tokens=False)
        if len(ids) >= length - len(begin):
            found.append(torch.tensor((begin + ids)[:length]))
    return found
