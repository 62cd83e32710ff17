"""Which twin of an op runs: ``hisparse.ops.<op>.reference`` or ``hisparse.ops.<op>.triton``.

CUDA tensors get the Triton twin where it exists in a form that has passed its tests on a GPU (`ON_CUDA`) and Triton is
installed, everything else the reference. The environment variable ``HISPARSE_BACKEND=reference|triton`` overrides that.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from hisparse.errors import ConfigError

BACKENDS = ("reference", "triton")
ON_CUDA = frozenset({"unpack"})
"""Ops whose Triton twin serves CUDA tensors unasked. The others pass in the interpreter but changed since they last
ran on a GPU: run their tests there, then add them."""


@cache
def has_triton(op: str) -> bool:
    """True where Triton is installed and `op` has a Triton twin."""
    return find_spec("triton") is not None and find_spec(f"hisparse.ops.{op}.triton") is not None


def backend_for(op: str, device: torch.device) -> str:
    """Name of the twin of `op` that serves tensors on `device`. Raises ConfigError for a bad HISPARSE_BACKEND."""
    forced = os.environ.get("HISPARSE_BACKEND")
    if not forced:
        return "triton" if device.type == "cuda" and op in ON_CUDA and has_triton(op) else "reference"
    if forced not in BACKENDS:
        raise ConfigError(f"HISPARSE_BACKEND = {forced!r}; use {' or '.join(BACKENDS)}, or unset it")
    if forced == "triton" and not has_triton(op):
        raise ConfigError(f"HISPARSE_BACKEND = triton, but {op} has no Triton twin here; unset it, or install triton")
    return forced


@cache
def _load(op: str, backend: str) -> ModuleType:
    return importlib.import_module(f"hisparse.ops.{op}.{backend}")


def select_backend(op: str, device: torch.device) -> ModuleType:
    """The module, reference or Triton twin of `op`, that serves tensors on `device`; imported on first use."""
    return _load(op, backend_for(op, device))
