"""Tests of the vLLM plugin. Those that start an engine need vLLM and are skipped without it (`make test-vllm`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Read when vLLM is imported: engines live in this process, use one thread, and ask nothing of the network.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# On a GPU stock vLLM attends in Triton where a model is in float32, whose products would else be rounded to TF32.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


@pytest.fixture(scope="session")
def prose() -> str:
    """A text that nothing was distilled or calibrated on: the documentation of this repository.

    Without its tables, each of which would be one sentence, longer than some documents that the text is cut into.
    """
    root = Path(__file__).resolve().parents[2]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((root / "docs").glob("*.md")))
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


@pytest.fixture(scope="session")
def ids(prose: str) -> list[int]:
    """The same as token ids."""
    from transformers import AutoTokenizer

    from hisparse.models.load import default_directory

    return list(AutoTokenizer.from_pretrained(default_directory())(prose).input_ids)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `engine_tools.small_llama`."""
    from engine_tools import small_llama

    return small_llama(tmp_path_factory.mktemp("small_model"))
