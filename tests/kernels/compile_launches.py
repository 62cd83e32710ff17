"""compile_launches.py FILE: does Triton compile for a GPU (sm_90) what its interpreter ran? Needs no GPU.

FILE: a pickled list of launches, each "ops/scan/kernels.py:scan_share" and its arguments by name; tensors are given as
their dtypes. Prints JSON: `compiled`, how many different ones, and `errors`, what the compiler said of the others.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

Launch = tuple[str, dict[str, Any]]


def compile_one(name: str, given: dict[str, Any]) -> None:
    path, function = name.split(":")
    kernel = getattr(importlib.import_module(f"hisparse.{path.removesuffix('.py').replace('/', '.')}"), function)
    values = {key: torch.zeros(16, dtype=x) if isinstance(x, torch.dtype) else x for key, x in given.items()}
    kernel.warmup(grid=(1,), **values)


def first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error)[-300:]}"


def main(launches: list[Launch]) -> dict[str, Any]:
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
        )
    )
    compiled, errors = 0, {}
    for name, given in launches:
        try:
            compile_one(name, given)
            compiled += 1
        except Exception as error:  # whatever the compiler raises is what is asked for
            errors[f"{name} {given}"] = first_cause(error)
    return {"compiled": compiled, "errors": errors}


if __name__ == "__main__":
    print(json.dumps(main(pickle.loads(Path(sys.argv[1]).read_bytes()))))
