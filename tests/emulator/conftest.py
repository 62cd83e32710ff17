"""The emulator in the place of the GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import emulator

for folder in ("kernels", "decode", "fetch"):
    sys.path.append(str(Path(__file__).parents[1] / folder))


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the kernels' own tests run on it")


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the kernels of a twin run in the emulator; other names of the module may be replaced, too."""

    def use(module: ModuleType, **others: Any) -> None:
        monkeypatch.setattr(module, "load_kernel", emulator.load_kernel)
        for name, value in others.items():
            monkeypatch.setattr(module, name, value)

    return use


@pytest.fixture
def altered(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Replaces a piece of a source: altered(path, old, new)."""
    pieces: list[tuple[str, str, str]] = []
    plain = emulator.read_source

    def read(path: str) -> str:
        text = plain(path)
        for of, old, new in pieces:
            if of == path:
                if old not in text:
                    raise ValueError(f"{path} has no {old!r}")
                text = text.replace(old, new)
        return text

    def alter(path: str, old: str, new: str) -> None:
        pieces.append((path, old, new))
        monkeypatch.setattr(emulator, "read_source", read)

    return alter
