"""What every test shares: the default model, and a machine that behaves the same everywhere."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no failure. In CI the examples are the same every time; at a desk they are new ones.
settings.register_profile("hisparse", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("hisparse")

# Triton reads this when a kernel is defined, so it has to be set before any of them is imported. Without a GPU the
# kernels run in Triton's interpreter.
if importlib.util.find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def default_model() -> tuple[Any, Any]:
    """(model, tokenizer) of the embedded default model: float32, evaluation mode. Fetched when it is not there."""
    from hisparse.models import load_model

    return load_model()
