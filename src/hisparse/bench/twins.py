"""Which twin of an operation a benchmark runs."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

import torch

from hisparse.errors import InputError
from hisparse.ops._dispatch import select_backend


def twin(op: str, device: torch.device, name: str | None = None) -> ModuleType:
    """The module that serves `op`: the one of that name, or what the operation itself takes, but a kernel if there is
    one. Raises InputError for a name that `op` has no twin of."""
    if name is not None:
        if find_spec(f"hisparse.ops.{op}.{name}") is None:
            raise InputError(f"{op} has no twin named {name!r}; leave --twin out to take the one in use")
        return importlib.import_module(f"hisparse.ops.{op}.{name}")
    module = select_backend(op, device)
    if name_of(module) == "reference" and device.type == "cuda" and find_spec(f"hisparse.ops.{op}.triton"):
        module = importlib.import_module(f"hisparse.ops.{op}.triton")
    return module


def name_of(module: ModuleType) -> str:
    return module.__name__.rsplit(".", 1)[-1]
