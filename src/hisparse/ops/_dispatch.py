"""Which twin of an op runs: ``hisparse.ops.<op>.reference``, ``.triton`` or ``.cuda``.

CUDA tensors get the first of the op's kernels in `ON_CUDA` that can run there, everything else the reference. The
environment variable ``HISPARSE_BACKEND=reference|triton|cuda`` overrides that; `cuda` means CUDA C++ where an op has
it, else Triton.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from hisparse.errors import ConfigError
from hisparse.ops._ahead import device_of
from hisparse.ops._cuda import can_run

BACKENDS = ("reference", "triton", "cuda")
ON_CUDA = {
    "attend": ("triton",),
    "decode": ("cuda", "triton"),
    "fetch": ("cuda", "triton"),
    "pack": ("cuda", "triton"),
    "scan": ("cuda", "triton"),
    "select": ("triton",),
    "sketch": ("triton",),
    "unpack": ("triton",),
}
"""The kernels that serve CUDA tensors unasked, best first: those that have passed their tests on a GPU."""


@cache
def has_triton(op: str) -> bool:
    """True where Triton is installed and `op` has a Triton twin."""
    return find_spec("triton") is not None and find_spec(f"hisparse.ops.{op}.triton") is not None


@cache
def has_cuda(op: str, index: int | None) -> bool:
    """True where `op` has a CUDA C++ twin and CUDA device `index` can run it."""
    return find_spec(f"hisparse.ops.{op}.cuda") is not None and find_spec("triton") is not None and can_run(index)


def _available(op: str, backend: str, device: torch.device) -> bool:
    return has_cuda(op, device.index) if backend == "cuda" else has_triton(op)


def backend_for(op: str, device: torch.device) -> str:
    """Name of the twin of `op` that serves tensors on `device`. Raises ConfigError for a bad HISPARSE_BACKEND."""
    forced, device = os.environ.get("HISPARSE_BACKEND"), device_of(device)
    if not forced:
        if device.type == "cuda":
            for backend in ON_CUDA.get(op, ()):
                if _available(op, backend, device):
                    return backend
        return "reference"
    if forced not in BACKENDS:
        raise ConfigError(
            f"HISPARSE_BACKEND = {forced!r}; use {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, or unset it"
        )
    if forced == "cuda" and device.type != "cuda":
        raise ConfigError(f"HISPARSE_BACKEND = cuda, but {op} was called with tensors on {device}; unset it")
    if forced == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"HISPARSE_BACKEND = triton, but {op} was called with tensors on {device}; unset it, or set "
            "TRITON_INTERPRET=1 to have Triton's interpreter run the kernels, slowly"
        )
    if forced == "cuda" and has_cuda(op, device.index):
        return "cuda"
    if forced != "reference" and not has_triton(op):
        raise ConfigError(f"HISPARSE_BACKEND = {forced}, but {op} has no kernel here; unset it, or install triton")
    return "reference" if forced == "reference" else "triton"


@cache
def _load(op: str, backend: str) -> ModuleType:
    return importlib.import_module(f"hisparse.ops.{op}.{backend}")


def select_backend(op: str, device: torch.device) -> ModuleType:
    """The module, reference or kernel twin of `op`, that serves tensors on `device`; imported on first use."""
    return _load(op, backend_for(op, device))
