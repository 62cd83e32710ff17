"""Everything that decoding and packing launch under vLLM has been compiled ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CASES: dict[str, dict[str, Any]] = {
    "glm4-9b-1m": {"heads": 4, "q_heads": 32, "dim": 128, "context": 1 << 20},
    "small heads, float16": {"heads": 2, "q_heads": 14, "dim": 64, "context": 32768, "dtype": "float16"},
    "large heads, no hot buffer": {"heads": 1, "q_heads": 4, "dim": 256, "context": 8000, "memory": 0},
    "rows on the device": {"heads": 8, "q_heads": 32, "dim": 128, "config": {"selection": {"rows": "device"}}},
    "nothing set aside": {"heads": 8, "q_heads": 32, "dim": 128, "config": {"evict": "none"}},
    "float32, one bit": {
        "heads": 2,
        "q_heads": 4,
        "dim": 64,
        "dtype": "float32",
        "config": {"selection": {"sketch_bits": 1}},
    },
    "nothing packed": {
        "heads": 2,
        "q_heads": 4,
        "dim": 64,
        "config": {"evict": "none", "vtq": {"enable_per_block_quant": False}},
    },
    "a size that CUDA C++ leaves to Triton": {"heads": 3, "q_heads": 9, "dim": 96, "context": 20000},
}


pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def run(program: str, *arguments: str, **settings: str) -> str:
    """What `program` of this folder prints, where Triton compiles: elsewhere its interpreter runs the kernels."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "HISPARSE_BACKEND")
    }
    command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    done = subprocess.run(command, env=environment | settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_what_is_launched_was_compiled_ahead(name: str) -> None:
    found = json.loads(
        run("fake_gpu.py", json.dumps({"dtype": "bfloat16", "context": 131072, "config": {}} | CASES[name]))
    )
    assert found["error"] == "None"
    assert not found["missed"]
    assert found["ahead"] > 5


def test_triton_compiles_in_the_background_and_raises_where_a_kernel_is_launched(tmp_path: Path) -> None:
    assert run("broken_kernels.py", TRITON_CACHE_DIR=str(tmp_path)) == "done\n"
