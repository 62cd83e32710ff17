"""What needs a GPU, in one go: tests of kernels, sanitizers, engines with CUDA graphs, a server, times.

    python tests/on_gpu.py --out FOLDER [--seconds 1800] [PART ...]
    python tests/on_gpu.py --list

Without names all parts but `engine-times` and `million`, which take long. Tests run beside each other where there are
several GPUs, one part a GPU; what is timed runs last, one after the other. A part without what it needs (vLLM,
compute-sanitizer) is left out and named. FOLDER gets each part's output, the results of benchmarks, and summary.json.
Ends with 1 where something failed or did not end in time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "-o", "addopts=", "-q", "--strict-markers", "--tb=short", "-p", "no:cacheprovider")
OUT = "{out}"
"""Stands for the folder in a command."""
PATIENCE = 10
"""Seconds until a command that was told to end is told more sternly."""
MOST = 6
"""Failures that the summary quotes of a part."""


@dataclass(frozen=True)
class Part:
    """Commands, one after the other, of words for Python. timed: must have the machine for itself, and goes on where
    one fails; every: gets all GPUs, as many as there are; extra: only by name; needs: a module, or a program."""

    commands: tuple[tuple[str, ...], ...]
    timed: bool = False
    every: bool = False
    extra: bool = False
    needs: str | None = None


def pytest_part(*words: str, needs: str | None, every: bool = False) -> Part:
    return Part(((*PYTEST, *words),), needs=needs, every=every)


def layer(name: str, *words: str) -> tuple[str, ...]:
    return ("benchmarks/vllm_layer.py", *words, "--out", f"{OUT}/layer-{name}.json")


def bench(*words: str) -> tuple[str, ...]:
    return ("-m", "hisparse", "bench", *words, "--out", OUT)


def engine(shape: str, *words: str) -> tuple[str, ...]:
    start = ("benchmarks/bench_vllm.py", "--shape", shape, "--claim", "--utilisation", "0.93")
    return (*start, *words, "--out", f"{OUT}/engine-{shape}-{words[1]}.json")


KERNELS = ("kernels", "decode", "fetch", "vtq", "ops", "tlif", "blgs", "cache")
LONG = ("--context", "4096", "131072", "1048576")
SHORT = ("-c", "131072", "-c", "1048576")
RECALL_FILE = "recall.json"
RECALL = {"prefill": {"mode": "recall"}}
PARTS = {
    "kernels": pytest_part("-n", "10", *(f"tests/{name}" for name in KERNELS), needs=None),
    "sanitizers": Part((("tests/sanitize.py", "--jobs", "10"),), needs="compute-sanitizer"),
    "models": pytest_part("-n", "4", "tests/integrations", needs=None),
    "engines": pytest_part("-m", "not server", "-n", "8", "--dist", "loadfile", "tests/vllm_engine", needs="vllm"),
    "servers": pytest_part("-m", "server", "-s", "tests/vllm_engine", needs="vllm"),
    "ranks": pytest_part("tests/vllm_engine/test_ranks.py", needs="vllm", every=True),
    "layer": Part(
        (
            layer("one", *LONG),
            layer("four", "--context", "131072", "262144", "--batch", "4"),
            layer("alike", "--spread", "0.001", "--context", "1048576"),
            layer("four-alike", "--spread", "0.001", "--context", "262144", "--batch", "4"),
            layer("small", "--shape", "qwen2.5-0.5b", "--kv-memory", "0", "--context", "4096", "131072"),
        ),
        timed=True,
    ),
    "bench": Part(
        (
            bench("decode", *SHORT),
            bench("recall", *SHORT, "--capacity", "9.1", "--capacity", "12", "--page-size", "64"),
            bench("sketch", "-c", "1048576"),
            bench("pack", "-c", "524288"),
            bench("tlif"),
            bench("plan"),
            bench("prefill"),
        ),
        timed=True,
    ),
    "engine-times": Part(
        (
            engine("glm4-9b-1m", "--kv", "hisparse", *LONG, "--batch", "1", "4", "--blocks", "16600"),
            engine("glm4-9b-1m", "--kv", "bfloat16", "fp8", *LONG),
            engine("qwen2.5-0.5b", "--kv", "hisparse", "bfloat16", "--context", "4096", "131072"),
        ),
        timed=True,
        extra=True,
        needs="vllm",
    ),
    "million": Part(
        (
            (
                "benchmarks/serve_long.py", "--shape", "glm4-9b-1m", "--context", "1048000",
                "--out", f"{OUT}/serve.json", "--", "--config", f"{OUT}/{RECALL_FILE}",
                "--num-gpu-blocks-override", "4300", "--max-num-batched-tokens", "16384",
            ),
        ),
        timed=True,
        extra=True,
        needs="vllm",
    ),
}  # fmt: skip


@dataclass
class Outcome:
    """Of a part. status: "good", "failed", "not in time", "left out: ..."; counts: of tests, by what became of them."""

    part: str
    status: str
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def there(needs: str | None) -> bool:
    return needs is None or shutil.which(needs) is not None or ("-" not in needs and find_spec(needs) is not None)


def read_report(path: Path) -> tuple[dict[str, int], list[str]]:
    """Counts, and what failed with the first line why, of pytest's report."""
    counts: dict[str, int] = {}
    failures = []
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except ElementTree.ParseError as error:
        return counts, [f"{path.name}: the report cannot be read ({error})"]
    for case in cases:
        kinds = [child for child in case if child.tag in ("failure", "error", "skipped")]
        if not kinds and not case.get("name"):
            continue  # a test that was interrupted
        kind = kinds[0].tag if kinds else "passed"
        counts[kind] = counts.get(kind, 0) + 1
        if kind in ("failure", "error"):
            why = (kinds[0].get("message") or "").strip().splitlines()[:1]
            failures.append(f"{case.get('classname')}::{case.get('name')}: {''.join(why)}")
    return counts, failures


def run_part(name: str, part: Part, out: Path, gpus: str, deadline: float) -> Outcome:
    """Runs a part's commands until one fails, or all of them where they are timed; their output goes to NAME.log."""
    begin, result = time.monotonic(), Outcome(name, "good")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "PYTHONUNBUFFERED": "1"}
    if not part.timed:  # a thread for each core in every one of these processes takes several times as long
        environment.setdefault("OMP_NUM_THREADS", "2")
    report, log = out / f"{name}.xml", out / f"{name}.log"
    report.unlink(missing_ok=True)  # of an earlier run
    with log.open("wb") as sink:
        for words in part.commands:
            left = deadline - time.monotonic()
            if left <= 0:
                result.status = "not in time"
                break
            command = [sys.executable, *(word.replace(OUT, str(out)) for word in words)]
            if words[: len(PYTEST)] == PYTEST:
                command.append(f"--junitxml={report}")
            sink.write(f"$ {' '.join(command)}\n".encode())
            sink.flush()
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                if process.wait(left):
                    result.status = "failed"
                    result.failures.append(f"status {process.returncode}: {' '.join(words)}")
            except subprocess.TimeoutExpired:
                result.status = "not in time"
            finally:
                end_group(process)
            if result.status != "good" and not part.timed:
                break
    if report.exists():
        result.counts, failures = read_report(report)
        if failures and result.status == "good":
            result.status = "failed"
        result.failures = failures or result.failures
    result.seconds = time.monotonic() - begin
    return result


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and what it started; pytest, interrupted, still reports what it has."""
    for word in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, word)
            if process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)


def visible() -> list[str]:
    """Names of the GPUs, as CUDA_VISIBLE_DEVICES has them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(i) for i in range(done.stdout.count("GPU "))]


def run_all(parts: dict[str, Part], out: Path, gpus: list[str], deadline: float) -> Iterator[Outcome]:
    """Tests first, a part a GPU at a time; then what wants all GPUs or is timed, one after the other."""
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def with_gpu(item: tuple[str, Part]) -> Outcome:
        gpu = free.get()
        try:
            return run_part(*item, out, gpu, deadline)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        yield from pool.map(with_gpu, [item for item in parts.items() if not (item[1].timed or item[1].every)])
    for name, part in parts.items():
        if part.timed or part.every:
            yield run_part(name, part, out, ",".join(gpus) if part.every else gpus[0], deadline)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="folder for output and results")
    parser.add_argument("--seconds", type=float, default=1800, help="after which what still runs is ended")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    arguments = parser.parse_args(words)
    for name in arguments.parts:
        if name not in PARTS:
            parser.error(f"part {name!r} is not known; use one of {', '.join(PARTS)}")
    chosen = {n: p for n, p in PARTS.items() if (n in arguments.parts if arguments.parts else not p.extra)}
    if arguments.list:
        for name, part in chosen.items():
            print(*(f"{name:13} python {' '.join(words)}" for words in part.commands), sep="\n")
        return 0
    if arguments.out is None:
        parser.error("--out FOLDER is missing: where output and results go")
    deadline = time.monotonic() + arguments.seconds
    if not (gpus := visible()):
        parser.error("there is no GPU here that nvidia-smi names")
    out = arguments.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / RECALL_FILE).write_text(json.dumps(RECALL))
    except OSError as error:
        parser.error(f"--out {arguments.out}: cannot be written to ({error.strerror}); give another folder")
    left_out = [Outcome(n, f"left out: {p.needs} is not here") for n, p in chosen.items() if not there(p.needs)]
    runnable = {name: part for name, part in chosen.items() if there(part.needs)}
    outcomes: list[Outcome] = []
    for outcome in (*left_out, *run_all(runnable, out, gpus, deadline)):
        outcomes.append(outcome)
        counts = ", ".join(f"{number} {kind}" for kind, number in outcome.counts.items())
        print(f"{outcome.part:13} {outcome.seconds:5.0f} s  {outcome.status}  {counts}", flush=True)
        for failure in outcome.failures[:MOST]:
            print(f"    {failure}", flush=True)
    summary: list[dict[str, Any]] = [vars(outcome) for outcome in outcomes]
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return any(outcome.status in ("failed", "not in time") for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
