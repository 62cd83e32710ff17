"""Machine code kept on disk, and programs compiled by background threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import UnsupportedError
from hisparse.ops import _ahead, _cuda, _kept

CODE = b"\x7fELF" + bytes(range(256)) * 3


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path))
    _kept._warn.cache_clear()
    return tmp_path / "kernels"


class Builds:
    """What builds code, and how often it did."""

    def __init__(self, code: bytes = CODE) -> None:
        self.code, self.number = code, 0

    def __call__(self) -> bytes:
        self.number += 1
        return self.code


def never() -> bytes:
    raise AssertionError("built though it was kept")


# -- files -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_names_are_those_of_one_list_only(a: list[str], b: list[str]) -> None:
    assert (_kept.name_of(a) == _kept.name_of(b)) == (a == b)


@given(st.binary(min_size=1, max_size=300))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, code: bytes) -> None:
    folder = tmp_path_factory.mktemp("kept")
    assert _kept.kept(["x"], lambda: code, folder) == code
    assert _kept.kept(["x"], never, folder) == code
    assert [file.name for file in folder.iterdir()] == [_kept.name_of(["x"])]


@given(st.data())
def test_damaged_files_are_built_again(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("kept")
    file = folder / _kept.name_of(["x"])
    _kept.write(file, CODE)
    whole = bytearray(file.read_bytes())
    how = data.draw(st.sampled_from(["cut", "longer", "changed"]))
    if how == "cut":
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif how == "longer":
        whole += data.draw(st.binary(min_size=1, max_size=40))
    else:
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(whole)
    assert _kept.read(file) is None
    builds = Builds()
    assert _kept.kept(["x"], builds, folder) == CODE
    assert builds.number == 1
    assert _kept.kept(["x"], never, folder) == CODE


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def build() -> bytes:
        barrier.wait(20)
        return CODE

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: _kept.kept(["x"], build, tmp_path), range(8)))
    assert found == [CODE] * 8
    assert [file.name for file in tmp_path.iterdir()] == [_kept.name_of(["x"])]
    assert _kept.read(tmp_path / _kept.name_of(["x"])) == CODE


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise UnsupportedError("does not compile")

    for _ in range(2):
        with pytest.raises(UnsupportedError, match="does not compile"):
            _kept.kept(["x"], fail, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    _kept._warn.cache_clear()
    for _ in range(2):
        assert _kept.kept(["x"], Builds(), tmp_path / "file" / "kernels") == CODE
    assert [record.message.count("HISPARSE_CACHE") for record in caplog.records] == [1]
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "file"))
    assert _kept.default_folder() is None
    assert _kept.kept(["x"], Builds(), None) == CODE
    assert [record.message.count("HISPARSE_CACHE") for record in caplog.records] == [1, 1]


def test_a_user_without_a_home_compiles(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("HISPARSE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    _kept._warn.cache_clear()
    assert _kept.default_folder() is None
    assert "no home; set HISPARSE_CACHE" in caplog.text


# -- sources -----------------------------------------------------------------------------------------------------------


def test_sources_are_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Builds()
    monkeypatch.setattr(_cuda, "compile_source", lambda *_: builds())
    monkeypatch.setattr(_cuda, "_compiler", lambda: "NVRTC 13.0")
    assert _cuda.build("decode/combine.cu", "sm_90", ["--define-macro=DIM=64"]) == CODE
    assert _cuda.build("decode/combine.cu", "sm_90", ["--define-macro=DIM=64"]) == CODE
    assert builds.number == 1
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("changed", ["source", "architecture", "options", "compiler", "path"])
def test_code_is_that_of_its_source_and_compiler(changed: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"source": "a", "architecture": "sm_90", "options": "-DX=1", "compiler": "NVRTC 13.0", "path": "x.cu"}
    builds = Builds()
    monkeypatch.setattr(_cuda, "compile_source", lambda *_: builds())
    monkeypatch.setattr(_cuda, "read_source", lambda _: given["source"])
    monkeypatch.setattr(_cuda, "_compiler", lambda: given["compiler"])
    _cuda.build(given["path"], given["architecture"], [given["options"]])
    given[changed] += "0"
    _cuda.build(given["path"], given["architecture"], [given["options"]])
    assert builds.number == 2


@pytest.mark.skipif(not _cuda.has_compiler(), reason="needs CUDA's Python bindings")
def test_the_compiler_s_code_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--define-macro=DIM=64", "--define-macro=BF16=1"]
    code = _cuda.build("decode/combine.cu", "sm_90", options)
    assert code[:4] == b"\x7fELF"
    monkeypatch.setattr(_cuda, "compile_source", lambda *_: never())
    assert _cuda.build("decode/combine.cu", "sm_90", options) == code


@pytest.mark.skipif(not _cuda.has_compiler(), reason="needs CUDA's Python bindings")
def test_what_does_not_compile_says_why_and_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "read_source", lambda _: "__global__ void f() { nonsense; }")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="nonsense"):
            _cuda.build("x.cu", "sm_90")
    assert not cache.exists()


# -- ahead -------------------------------------------------------------------------------------------------------------


class Loaded:
    """Takes the place of a kernel on a GPU."""

    def __init__(self, binary: bytes, function: str) -> None:
        self.binary, self.name = binary, function


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Builds:
    """The loader of a machine with a GPU, whose compiler counts."""
    builds = Builds()
    monkeypatch.setattr(_cuda, "_build", lambda *_: builds())
    monkeypatch.setattr(_cuda, "_architecture", lambda _: "sm_90")
    monkeypatch.setattr(_cuda, "Kernel", Loaded)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_ahead, "_PROGRAMS", {})
    _cuda._load.cache_clear()
    return builds


def load(size: int = 1) -> Any:
    return _cuda.load_kernel("x/x.cu", "f", {"SIZE": size})


def test_what_was_compiled_ahead_is_loaded(loader: Builds) -> None:
    idle = []

    def call() -> None:
        for _ in range(2):
            kernel = load()
            kernel.prefer_shared()((1, 1, 1), 32, [torch.empty(3, device="meta")], 0)
            kernel(grid=(1, 1, 1), block=32, args=[3, 0.5, None], shared=64, overlap=True, together=True)
            idle.append((kernel.name, kernel.resident(32), kernel.prefer_shared() is kernel))

    background = _ahead.Background(call, 0, 2)
    background.join()
    assert background.error is None
    assert idle == [("f", 1, True)] * 2
    assert loader.number == 1
    kernel = load()
    assert (kernel.binary, kernel.name, loader.number) == (CODE, "f", 1)
    assert load() is kernel
    assert load(2).binary == CODE  # which nobody foresaw
    assert loader.number == 2


def test_errors_are_raised_where_the_kernel_is_used(loader: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise UnsupportedError("f does not compile")

    monkeypatch.setattr(_cuda, "_build", fail)
    background = _ahead.Background(lambda: load() and None, 0, 1)
    background.join()
    assert background.error is None
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="f does not compile"):
            load()
    monkeypatch.setattr(_cuda, "_build", lambda *_: CODE)
    assert load().binary == CODE


def test_a_guess_that_fails_costs_a_warning(loader: Builds, caplog: pytest.LogCaptureFixture) -> None:
    def call() -> None:
        load()
        raise RuntimeError("no such operation")

    background = _ahead.Background(call, 0, 1)
    background.join()
    assert str(background.error) == "no such operation"
    assert "no such operation" in caplog.text
    assert load().binary == CODE
    assert loader.number == 1


def test_only_the_thread_that_compiles_ahead_launches_nothing(loader: Builds) -> None:
    ready, done = threading.Event(), threading.Event()
    meta, gpu = torch.device("meta"), torch.device("cuda", 3)
    seen = []

    def call() -> None:
        seen.append((_ahead.current() is not None, _ahead.device_of(meta)))
        ready.set()
        done.wait(20)

    background = _ahead.Background(call, 3, 1)
    assert ready.wait(20)
    assert (_ahead.current(), _ahead.device_of(meta)) == (None, meta)
    assert isinstance(load(), Loaded)
    done.set()
    background.join()
    assert seen == [(True, gpu)]
