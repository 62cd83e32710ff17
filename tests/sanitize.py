"""Small cases of every kernel under NVIDIA's compute-sanitizer: memcheck and racecheck, several at a time.

    python tests/sanitize.py [--jobs 8] [--timeout 300] [CASE ...]

Needs a GPU and `compute-sanitizer` (a part of the CUDA toolkit). Racecheck makes a process some hundred times slower:
cases are small on purpose. Ends with 1 where an error or a hazard was found, a result was wrong or a case did not end.
Hazards between accesses of cuDNN's own kernels, which prefill attention calls, are named but are not HiSparse's.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / name) for name in ("decode", "vtq", "kernels", "fetch", "ops", "vllm_engine", "tlif")]

FOUND = 9
"""Status of a sanitizer that found something; a case that fails by itself has another."""
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}

ACCESS = re.compile(r"(?:Read|Write) access at (\S+?)\+0x")
"""A kernel that racecheck names, twice a hazard."""
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")

TESTS: dict[str, tuple[int, list[str]]] = {
    "pack-cuda": (3, ["kernels/test_pack_cuda.py"]),
    "pack-triton": (3, ["kernels/test_pack_kernels.py"]),
    "sketch": (3, ["kernels/test_sketch_kernels.py"]),
    "prefill": (4, ["ops/test_attention.py"]),
    "selection": (4, ["ops/test_row_selection.py", "vllm_engine/test_step_kernels.py"]),
    "tlif": (2, ["tlif/test_fused.py"]),
    "vllm": (6, ["vllm_engine/test_hot.py", "vllm_engine/test_packing.py"]),
}
"""A name: how many tests, evenly spaced, of which files."""


def attend(twin: str, cases: list[tuple[dict[str, Any], str | None, bool]]) -> None:
    """Decode attention over few pages, by few programs, so that several work on a sequence; against float64."""
    import numpy as np
    import torch
    from decode_oracle import expected, make_case
    from test_decode_attention import _on_device

    from hisparse.ops.decode import cuda, triton

    module = cuda if twin == "cuda" else triton
    module._multiprocessors = lambda index: 6  # type: ignore[attr-defined]
    for options, split, mass in cases:
        case = make_case(**options)
        moved = _on_device(case, "cuda")
        found = module.decode_attention(*moved.arguments(), moved.extra_logit, moved.extra_value, mass, split)
        torch.cuda.synchronize()
        wanted = expected(case)[0]
        length = np.maximum(np.linalg.norm(wanted, axis=-1), 1e-6)
        error = (np.linalg.norm(found.out.double().cpu().numpy() - wanted, axis=-1) / length).max()
        print(f"{options}: error {error:.1e}", flush=True)
        if not error < 2e-2:
            raise SystemExit("wrong result")


def decode_cuda() -> None:
    import torch

    half, brain = torch.float16, torch.bfloat16
    base: dict[str, Any] = {"heads": 4, "queries": 8, "dim": 128, "tokens": 8, "group": 64}
    base.update(counts=(61,), rows=(37,), lengths=(37,))
    attend(
        "cuda",
        [
            ({**base, "dtype": brain, "split": "rope"}, "rope", False),
            ({**base, "dtype": brain, "bits": (4, 4), "split": "never"}, "never", False),
            ({**base, "dtype": half, "bits": (5, 4), "split": "rope"}, "rope", True),
            ({**base, "dtype": half, "dim": 64, "queries": 7, "heads": 2, "split": "never"}, "never", True),
        ],
    )


def decode_triton() -> None:
    import torch

    half, brain = torch.float16, torch.bfloat16
    one: dict[str, Any] = {"counts": (3,), "rows": None, "lengths": (2,), "heads": 1}
    small: dict[str, Any] = {"dtype": half, "heads": 1, "counts": (3,), "rows": (1,), "lengths": (5,)}
    attend(
        "triton",
        [
            ({"dtype": brain, "counts": (5, 2), "rows": (2, 1), "lengths": (37, 3)}, None, False),
            ({"bits": (5, 5), "split": "rope", **one}, "rope", False),
            ({"bits": (6, 6), "split": "never", **one}, "never", False),
            ({**small, "queries": 1, "dim": 96, "group": 96, "tokens": 4}, None, True),
            ({"dtype": brain, "raw": True, "counts": (5,), "rows": (3,), "lengths": (1,), "heads": 2}, None, True),
        ],
    )


def scan() -> None:
    import torch
    from test_scan_kernels import make_case

    from hisparse.ops.scan import cuda, reference, triton

    case = make_case(4, 128, 8, 2, 4, [123, 63], 130)
    wanted = reference.scan_and_select(*(part.to("cpu") for part in case), 0.1, 2, 32, None)
    for module in (cuda, triton):
        found = module.scan_and_select(*case, 0.1, 2, 32, None)
        torch.cuda.synchronize()
        if not torch.equal(found.number.cpu(), wanted.number):
            raise SystemExit(f"wrong result: {found.number.tolist()} rows for {wanted.number.tolist()}")


def fetch() -> None:
    import torch

    from hisparse.ops.fetch import HostRows, HotBuffer, fetch_rows

    device = torch.device("cuda", 0)
    host = torch.randint(0, 256, (300, 272), dtype=torch.uint8).pin_memory()
    source = HostRows.of([host], device)
    hot = HotBuffer.empty((90, 80), 272, 300, device)
    for _ in range(3):
        rows = torch.stack([torch.randperm(150)[:60], 150 + torch.randperm(150)[:60]]).int().to(device)
        table = fetch_rows(hot, source, rows, torch.tensor([60, 33], dtype=torch.int32, device=device))
        torch.cuda.synchronize()
        for i, number in enumerate((60, 33)):
            if not torch.equal(hot.buffer[table[i, :number].long()].cpu(), host[rows[i, :number].long().cpu()]):
                raise SystemExit("wrong rows")


DIRECT: dict[str, Callable[[], None]] = {
    "decode-cuda": decode_cuda,
    "decode-triton": decode_triton,
    "scan": scan,
    "fetch": fetch,
}


def run_case(name: str) -> int:
    """Run a case in this process; says "finished" where something was run and nothing was wrong."""
    if name in DIRECT:
        DIRECT[name]()
        print("finished")
        return 0
    import pytest

    number, files = TESTS[name]

    class Few:
        passed = 0

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            step = max(1, len(items) // number)
            items[:] = items[step // 2 :: step][:number]

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.passed += report.when == "call" and report.passed

    few = Few()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    status = int(pytest.main([*options, *(str(ROOT / file) for file in files)], plugins=[few]))
    print("finished" if status == 0 and few.passed else "failed")
    return status


def verdict(tool: str, status: int, output: str) -> tuple[bool, str]:
    """Whether a case was clean, and how; status and output are those of the sanitizer's process."""
    good = "finished" in output and "failed" not in output  # tests may all have been skipped
    if good and status == 0 and CLEAN[tool] in output:
        return True, "clean"
    summary, kernels = SUMMARY.search(output), ACCESS.findall(output)
    others = all(kernel.startswith("cudnn_") for kernel in kernels)
    # Every hazard that was counted is one whose two accesses are named.
    if good and status == FOUND and summary and others and len(kernels) == 2 * int(summary[1]):
        return True, f"clean but for {', '.join(sorted(set(kernels)))}"
    return False, f"status {status}\n{output[-4000:]}"


def sanitize(name: str, tool: str, limit: float) -> tuple[str, str, bool, str]:
    begin = time.perf_counter()
    command = ["compute-sanitizer", "--report-api-errors", "no", "--error-exitcode", str(FOUND), "--tool", tool]
    command += [sys.executable, __file__, "--inside", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT.parent)
    except subprocess.TimeoutExpired:
        return name, tool, False, f"did not end within {limit:.0f} s"
    good, text = verdict(tool, done.returncode, done.stdout + done.stderr)
    return name, tool, good, f"{time.perf_counter() - begin:3.0f} s, {text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*DIRECT, *TESTS]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)}; all when none is named")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a case may take")
    parser.add_argument("--inside", metavar="CASE", help="run one case without a sanitizer")
    arguments = parser.parse_args()
    for name in [*arguments.cases, *filter(None, [arguments.inside])]:
        if name not in names:
            parser.error(f"case {name!r} is not known; use one of {', '.join(names)}")
    if arguments.inside:
        return run_case(arguments.inside)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    clean = True
    with ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = [(name, tool) for name in arguments.cases or names for tool in CLEAN]
        for name, tool, good, text in pool.map(lambda job: sanitize(*job, arguments.timeout), jobs):
            print(f"{name:14} {tool:10} {text}", flush=True)
            clean &= good
    return not clean


if __name__ == "__main__":
    sys.exit(main())
