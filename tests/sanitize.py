"""Small cases of every kernel under NVIDIA's compute-sanitizer: memcheck and racecheck, several at a time.

    python tests/sanitize.py [--jobs 8] [--timeout 300] [CASE ...]

Needs a GPU and `compute-sanitizer` (a part of the CUDA toolkit). Racecheck makes a process some hundred times slower:
cases are small on purpose. Each says which kernels it launches, and does not count where it launched others only. Ends
with 1 where an error or a hazard was found, a result was wrong, a kernel was not launched or a case did not end.
Hazards between accesses of libraries' kernels, which prefill attention calls, are named but are not HiSparse's.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "kernels"))
from sanitizer_cases import CASES

ROOT = Path(__file__).parent

FOUND = 9
"""Status of a sanitizer that found something; a case that fails by itself has another."""
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}

ACCESS = re.compile(r"(?:Read|Write) access at (.+?)\+0x")
"""A kernel that racecheck names, twice a hazard."""
LIBRARIES = re.compile(r"cudnn_|fmha_cutlass|(void )?pytorch_flash::|_ZN13pytorch_flash")
"""How the attention kernels begin that PyTorch brings."""
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")

Settings = dict[str, str]


@dataclass
class Launches:
    """The kernels that were launched: name, "ops/scan/step.cu:scan_and_choose", and what it was compiled for."""

    seen: list[tuple[str, Settings]] = field(default_factory=list)

    def note(self, name: str, settings: dict[str, Any]) -> None:
        known = {key: str(int(value)) for key, value in settings.items() if isinstance(value, int)}
        if (name, known) not in self.seen:
            self.seen.append((name, known))

    def missing(self, kernels: tuple[str, ...]) -> list[str]:
        """Those of `kernels` that were not launched; in "NAME KEY=VALUE" the value is an integer the kernel had."""

        def launched(kernel: str) -> bool:
            name, *wanted = kernel.split()
            pairs = {tuple(pair.split("=")) for pair in wanted}
            return any(name == other and pairs <= set(known.items()) for other, known in self.seen)

        return [kernel for kernel in kernels if not launched(kernel)]


@contextmanager
def recorded() -> Iterator[Launches]:
    """Notes every launch of a Triton kernel and of a kernel in CUDA C++."""
    import pytest
    from triton.runtime.jit import KernelInterface

    from hisparse.ops import _cuda

    launches = Launches()
    take, load, launch = KernelInterface.__getitem__, _cuda._load, _cuda.Kernel.__call__

    def noted(kernel: Any, grid: Any) -> Any:
        run = take(kernel, grid)

        def start(*arguments: Any, **options: Any) -> Any:
            name = f"{kernel.fn.__module__.removeprefix('hisparse.').replace('.', '/')}.py:{kernel.fn.__name__}"
            launches.note(name, {**dict(zip(kernel.arg_names, arguments, strict=False)), **options})
            return run(*arguments, **options)

        return start

    origins: dict[int, tuple[str, Settings]] = {}

    def loaded(path: str, function: str, macros: Any, registers: Any, index: int) -> Any:
        kernel = load(path, function, macros, registers, index)
        origins[id(kernel)] = f"ops/{path}:{function}", dict(macros)
        return kernel

    def launched(kernel: Any, *arguments: Any, **options: Any) -> None:
        launch(kernel, *arguments, **options)
        if id(kernel) in origins:
            launches.note(*origins[id(kernel)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", noted)
        patch.setattr(_cuda, "_load", loaded)
        patch.setattr(_cuda.Kernel, "__call__", launched)
        yield launches


def run_case(name: str) -> int:
    """Run a case in this process; says "finished" where nothing was wrong and all its kernels were launched."""
    import torch

    with recorded() as launches:
        CASES[name].run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    missing = launches.missing(CASES[name].kernels)
    print(f"not launched: {', '.join(missing)}" if missing else "finished", flush=True)
    return bool(missing)


def verdict(tool: str, status: int, output: str) -> tuple[bool, str]:
    """Whether a case was clean, and how; status and output are those of the sanitizer's process."""
    good = re.search(r"^finished$", output, re.MULTILINE) is not None
    if good and status == 0 and CLEAN[tool] in output:
        return True, "clean"
    summary, kernels = SUMMARY.search(output), ACCESS.findall(output)
    others = all(LIBRARIES.match(kernel) for kernel in kernels)
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
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all when none is named")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a case may take")
    parser.add_argument("--inside", metavar="CASE", help="run one case without a sanitizer")
    arguments = parser.parse_args()
    for name in [*arguments.cases, *filter(None, [arguments.inside])]:
        if name not in CASES:
            parser.error(f"case {name!r} is not known; use one of {', '.join(CASES)}")
    if arguments.inside:
        return run_case(arguments.inside)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    clean = True
    with ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = [(name, tool) for name in arguments.cases or CASES for tool in CLEAN]
        for name, tool, good, text in pool.map(lambda job: sanitize(job[0], job[1], arguments.timeout), jobs):
            print(f"{name:14} {tool:10} {text}", flush=True)
            clean &= good
    return not clean


if __name__ == "__main__":
    sys.exit(main())
