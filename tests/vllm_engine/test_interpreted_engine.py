"""An engine that runs a GPU's kernels: on a CPU in Triton's interpreter, by `interpreted_engine.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine_tools import MIB, RAW, SMALL, engine, generate, random_prompts

TRITON = Path(sys.prefix) / "triton-alone"
"""Where `make vllm-env` puts Triton, which vLLM for CPUs cannot bear to find by itself."""
NEW = 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="other tests run the kernels on a GPU")
@pytest.mark.skipif(not TRITON.exists(), reason="needs Triton (`make vllm-env`)")
def test_requests_that_decode_beside_chunks_say_what_they_say_otherwise(small_model: Path) -> None:
    """The stock engine's tokens, where nothing is set aside and nothing packed."""
    prompts = random_prompts(700, 30, 300, 150, 64, 65)
    options: dict[str, Any] = {"model": str(small_model), **SMALL}
    with engine(None, 64 * MIB, **options) as llm:
        expected = generate(llm, prompts, NEW, detokenize=False)
    command = [sys.executable, str(Path(__file__).with_name("interpreted_engine.py")), str(small_model)]
    command += [json.dumps({**RAW, "tlif": {"prefix_length": 24}}), json.dumps(prompts), str(NEW)]
    paths = [str(TRITON), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
