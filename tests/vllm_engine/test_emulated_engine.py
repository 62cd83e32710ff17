"""An engine that runs on a CPU all that a GPU would run, each operation compared with its reference.

`HISPARSE_DRAWN="SEED NUMBER SECONDS"` adds as many engines drawn at random, as far as the seconds reach.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine_scenarios import EVERY_KERNEL

sys.path.append(str(Path(__file__).parents[1] / "emulator"))
import emulator

TRITON = Path(sys.prefix) / "triton-alone"
"""Where `make vllm-env` puts Triton, which vLLM for CPUs cannot bear to find by itself."""
KERNELS = {
    "ops/scan": "weigh.cu:weigh_queries step.cu:scan_and_choose scan.cu:scan_rows select.cu:sum_rows "
    "select.cu:choose_rows kernels.py:weigh_queries kernels.py:scan_share kernels.py:combine_shares "
    "kernels.py:sum_heads choose.py:count_first choose.py:take_first choose.py:take_rest",
    "ops/fetch": "fetch.cu:fetch_rows triton.py:assign triton.py:move",
    "ops/decode": "decode.cu:decode combine.cu:combine triton.py:_decode kernels.py:combine",
    "ops/pack": "pack.cu:pack triton.py:_pack",
    "ops/unpack": "triton.py:_unpack",
    "ops/sketch": "kernels.py:sketch_bfloat16 triton.py:_build triton.py:_score",
    "ops/select": "triton.py:_denominators triton.py:_worth",
    "ops/attend": "kernels.py:_merge kernels.py:_gather kernels.py:_coordinates kernels.py:_worth",
    "tlif": "fused.py:_norms fused.py:_importance",
    "integrations/vllm": "step_kernels.py:_begin step_kernels.py:_fill_table step_kernels.py:_limit "
    "step_kernels.py:_renew kernels.py:_claim kernels.py:_list kernels.py:_hand_out kernels.py:_locate",
}
"""What a decode step, a chunk and packing launch, whatever an engine's settings."""

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="other tests run the kernels on a GPU"),
    pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++, for kernels in CUDA C++"),
    pytest.mark.skipif(not TRITON.exists(), reason="needs Triton (`make vllm-env`)"),
]


def run(folder: Path, scenarios: str, limit: float) -> list[dict[str, Any]]:
    """What `emulated_engine.py` prints."""
    program = Path(__file__).with_name("emulated_engine.py")
    paths = [str(TRITON), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(folder), scenarios],
        env=environment, capture_output=True, text=True, timeout=limit, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = [line for line in lines if line.get("error")]
    said = "".join(f"\n{line['name']}: {line['error']}\n{json.dumps(line['scenario'])}" for line in failed)
    assert done.returncode == 0, said or done.stderr[-4000:]
    return lines


def test_every_kernel_does_what_its_reference_does(tmp_path: Path) -> None:
    *lines, ended = run(tmp_path, json.dumps([asdict(scenario) for scenario in EVERY_KERNEL]), 600)
    assert [line["name"] for line in lines] == [scenario.name for scenario in EVERY_KERNEL]
    wanted = {f"{folder}/{kernel}" for folder, kernels in KERNELS.items() for kernel in kernels.split()}
    assert wanted - ended["launched"].keys() == set()
    first = lines[0]["counts"]
    assert all(first[name] > 0 for name in ("hits", "preemptions", "hot_hits", "hot_misses")), first


@pytest.mark.skipif("HISPARSE_DRAWN" not in os.environ, reason='takes long: HISPARSE_DRAWN="SEED NUMBER SECONDS"')
def test_engines_drawn_at_random(tmp_path: Path) -> None:
    drawn = os.environ["HISPARSE_DRAWN"]
    *lines, _ = run(tmp_path, f"drawn {drawn}", 600 + float(drawn.split()[2]))
    assert lines
