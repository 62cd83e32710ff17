"""Machine code kept on disk, so that a machine compiles a CUDA C++ source once.

``kernels/`` of the cache directory (``$HISPARSE_CACHE``, else ``~/.cache/hisparse``) has a file for every compiled
program, named after everything that the code follows from: a SHA-256 digest of the code, then the code. Files appear
under their names whole, by a rename; what does not agree with its digest is compiled again. Nothing is ever removed:
the folder may be, at any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from hisparse.errors import HiSparseError

logger = logging.getLogger("hisparse")

FOLDER = "kernels"
_DIGEST = hashlib.sha256().digest_size


def name_of(parts: Sequence[str]) -> str:
    """The file name of code that follows from `parts`: no two different lists have the same."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"{digest.hexdigest()}.cubin"


@cache
def _warn(reason: str) -> None:
    """Once for each reason."""
    logger.warning("compiled kernels are not kept, so every process compiles them again: %s", reason)


def default_folder() -> Path | None:
    """Where code is kept; None, with a warning, where nothing can be written."""
    from hisparse.models.fetch import cache_directory

    try:
        folder = cache_directory() / FOLDER
    except HiSparseError as error:
        _warn(str(error))
        return None
    return folder


def read(file: Path) -> bytes | None:
    """The code in `file`; None where there is none that agrees with its digest."""
    try:
        data = file.read_bytes()
    except OSError:
        return None  # not there yet, or not readable: then it is compiled
    digest, code = data[:_DIGEST], data[_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def write(file: Path, code: bytes) -> None:
    """Keep `code` in `file`. Warns where that fails: it only costs time."""
    from hisparse.models.fetch import REMEDY

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as partial:
                partial.write(hashlib.sha256(code).digest() + code)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        _warn(f"{file.parent}: {error.strerror}; {REMEDY}")


def kept(parts: Sequence[str], build: Callable[[], bytes], folder: Path | None) -> bytes:
    """What `build` makes of `parts`, from `folder` where it is there already. None: nothing is kept."""
    if folder is None:
        return build()
    file = folder / name_of(parts)
    code = read(file)
    if code is None:
        code = build()
        write(file, code)
    return code
