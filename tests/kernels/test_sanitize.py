"""The script around NVIDIA's sanitizers: what it takes for clean, and that no kernel is left out.

On the CPU its cases run in Triton's interpreter and in the emulator of kernels in CUDA C++.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.extend(str(Path(__file__).parents[1] / name) for name in (".", "emulator"))
from sanitizer_cases import CASES, Case

import emulator
import sanitize
from hisparse.ops import _cuda, _dispatch

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src/hisparse"
NOT_INTERPRETED = ("yardsticks", "vllm-graphs")
"""Cases whose kernels the interpreter cannot run, and one that is another one where there are no graphs."""
DISPATCHED = {"prefill": ("unpack",), "vllm-hot": ("fetch",), "vllm-pack": ("pack", "sketch")}
"""Cases that ask for the twin that serves, and for which ops: on the CPU that would be the reference."""
RACE = """finished
========= Error: Race reported between Read access at {}+0x300
=========     and Write access at {}+0x68c0 [24 hazards]
========= RACECHECK SUMMARY: {} hazard{} displayed (1 error, 0 warnings)
"""
FUSED = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 4>, (bool)0>(Flash_fwd_params)"


@pytest.mark.parametrize(
    ("tool", "status", "output", "good"),
    [
        ("memcheck", 0, "finished\n========= ERROR SUMMARY: 0 errors\n", True),
        ("memcheck", 0, "========= ERROR SUMMARY: 0 errors\n", False),  # it did not get to its end
        ("memcheck", 0, "not launched: ops/x.cu:y\n========= ERROR SUMMARY: 0 errors\n", False),
        ("memcheck", 9, "finished\n========= ERROR SUMMARY: 2 errors\n", False),
        ("memcheck", 1, "wrong result\n========= ERROR SUMMARY: 0 errors\n", False),
        ("racecheck", 0, "finished\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)\n", True),
        ("racecheck", 0, "finished\n", False),  # the sanitizer has said nothing
        ("racecheck", 9, RACE.format(FUSED, FUSED, 1, ""), True),
        ("racecheck", 9, RACE.format(FLASH, FLASH, 1, ""), True),
        ("racecheck", 9, RACE.removeprefix("finished\n").format(FUSED, FUSED, 1, ""), False),
        ("racecheck", 9, RACE.format(FUSED, FUSED, 2, "s"), False),  # one that is not named
        ("racecheck", 9, RACE.format("scan_and_choose", FUSED, 1, ""), False),
        ("racecheck", 9, RACE.format(FUSED, "scan_and_choose", 1, ""), False),
    ],
)
def test_verdict(tool: str, status: int, output: str, good: bool) -> None:
    assert sanitize.verdict(tool, status, output)[0] is good


# ---- all kernels -----------------------------------------------------------------------------------------------------


@cache
def triton_functions() -> tuple[set[str], set[str], set[str]]:
    """Names of Triton's functions, of those launched, and of those that another one calls."""
    functions, launched, called = set(), set(), set()
    for file in SOURCES.rglob("*.py"):
        tree, here = ast.parse(file.read_text()), str(file.relative_to(SOURCES))
        places = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hisparse."):
                module = str(node.module).removeprefix("hisparse.").replace(".", "/")
                places.update({name.asname or name.name: f"{module}.py:{name.name}" for name in node.names})

        def named(name: str, here: str = here, places: dict[str, str] = places) -> str:
            return places.get(name, f"{here}:{name}")

        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                if any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list):
                    functions.add(f"{here}:{node.name}")
                    inside = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
                    called |= {named(function.id) for function in inside if isinstance(function, ast.Name)}
            elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                launched.add(named(node.value.id))  # with a grid; whatever else is indexed is no function of Triton
    return functions, functions & launched, functions & called


def cuda_kernels() -> set[str]:
    found = set()
    for file in [*SOURCES.rglob("*.cu"), *SOURCES.rglob("*.cuh")]:
        for head in re.findall(r"__global__([^{;]*)\{", re.sub(r"//.*", "", file.read_text())):
            name = re.search(r"(\w+)\s*\(", re.sub(r"__\w+__\s*\([^)]*\)", "", head))
            assert name, f"{file}: a kernel without a name"
            found.add(f"{file.relative_to(SOURCES)}:{name[1]}")
    return found


def test_all_functions_of_triton_are_known_as_kernels_or_as_parts_of_some() -> None:
    functions, launched, called = triton_functions()
    assert functions == launched | called
    assert not launched & called


def test_every_kernel_has_a_case() -> None:
    kernels = triton_functions()[1] | cuda_kernels()
    assert len(cuda_kernels()) == sum(file.read_text().count("__global__") for file in SOURCES.rglob("*.cu*"))
    assert {name.split()[0] for case in CASES.values() for name in case.kernels} == kernels


# ---- what is launched ------------------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels in CUDA C++ run in the emulator; in `DISPATCHED` tensors on the CPU get what serves those on a GPU."""
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    from hisparse.integrations.vllm import hot
    from hisparse.ops.decode import cuda as decode
    from hisparse.ops.fetch import cuda as fetch
    from hisparse.ops.pack import cuda as pack
    from hisparse.ops.scan import cuda as scan

    class Noted(emulator.EmulatedKernel):
        """Calls what the script looks at on a GPU."""

        loaded: Any

        def __call__(self, *arguments: Any, **options: Any) -> None:
            super().__call__(*arguments, **options)
            self.loaded(*arguments, **options)

    @cache
    def emulated(path: str, function: str, macros: tuple[tuple[str, int], ...]) -> Noted:
        return Noted(_cuda.read_source(path), function, dict(macros))

    def load(path: str, function: str, defines: Any = None, registers: Any = None, device: Any = None) -> Any:
        kernel = emulated(path, function, tuple((defines or {}).items()))
        kernel.loaded = plain(path, function, defines, registers, torch.device("cuda", 0))
        return kernel

    no_device(monkeypatch)
    plain = _cuda.load_kernel
    for module in (decode, fetch, pack, scan):
        monkeypatch.setattr(module, "load_kernel", load)
    monkeypatch.setattr(decode, "can_run", lambda index: True)
    monkeypatch.setattr(scan, "multiprocessors", lambda index: 6)
    serve, gpu = _dispatch.backend_for, torch.device("cuda", 0)
    monkeypatch.setattr(_dispatch, "can_run", lambda index: True)
    for place in (_dispatch, hot):
        monkeypatch.setattr(
            place, "backend_for", lambda op, device: serve(op, gpu if op in DISPATCHED.get(name, ()) else device)
        )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    _dispatch.has_cuda.cache_clear()
    yield
    _dispatch.has_cuda.cache_clear()


def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in CUDA C++ are loaded from nothing and do nothing when they are launched."""
    monkeypatch.setattr(_cuda, "_load", cache(_cuda._load.__wrapped__))
    monkeypatch.setattr(_cuda, "_architecture", lambda index: "sm_90")
    monkeypatch.setattr(_cuda, "_build", lambda *program: b"")
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(_cuda.Kernel, "__init__", lambda kernel, binary, function: None)
    monkeypatch.setattr(_cuda.Kernel, "__call__", lambda kernel, *launch, **options: None)


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/sanitize.py runs it on a GPU")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Launches of Triton's kernels, those with other dtypes and constants apart; see compile_launches.py."""
    found: dict[str, Any] = {}
    plain = sanitize.Launches.note

    def note(launches: Any, name: str, settings: dict[str, Any]) -> None:
        plain(launches, name, settings)
        if ".py:" in name:
            given = {key: x.dtype if isinstance(x, torch.Tensor) else x for key, x in settings.items()}
            which = {key: x for key, x in given.items() if key.isupper() or isinstance(x, torch.dtype)}
            found.setdefault(f"{name} {which}", (name, given))

    monkeypatch.setattr(sanitize.Launches, "note", note)
    return found


@on_cpu
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_INTERPRETED])
def test_a_case_is_right_and_launches_what_it_says(
    name: str, launched: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And Triton compiles for a GPU what its interpreter ran."""
    assert sanitize.run_case(name) == 0
    assert capsys.readouterr().out.endswith("finished\n")
    if launched:
        (tmp_path / "launches").write_bytes(pickle.dumps(list(launched.values())))
        settings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        command = [sys.executable, str(TESTS / "kernels" / "compile_launches.py"), str(tmp_path / "launches")]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"compiled": len(launched), "errors": {}}


@on_cpu
def test_compiled_kernels_are_noted() -> None:
    """With Triton's own functions in the place of the interpreter's: nothing is compiled here, nor run."""
    program = f"""
        import sys
        sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / "kernels")!r}]
        from triton.runtime.jit import JITFunction
        JITFunction.run = lambda self, *args, grid, warmup, **options: None
        import sanitize, sanitizer_cases, torch
        from hisparse.bench.kernels import _read, copy_all
        x = torch.zeros(8, dtype=torch.int32)
        with sanitize.recorded() as launches:
            copy_all(x, x, 3, 4, 1)
            _read.warmup(x, x, 2, BLOCK=4, grid=(1,))
        kernels = sanitizer_cases.CASES["yardsticks"].kernels
        print(type(_read).__name__, launches.missing(kernels), launches.missing(("bench/kernels.py:_copy BLOCK=4",)))
    """
    program = "\n".join(line.strip() if line.startswith("        ") else line for line in program.splitlines())
    program = program.replace("\ncopy_all", "\n    copy_all").replace("\n_read", "\n    _read")
    settings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True, check=False)
    assert done.stdout == "JITFunction ['bench/kernels.py:_read'] []\n", done.stderr


@on_cpu
def test_kernels_in_cuda_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    no_device(monkeypatch)
    gpu = torch.device("cuda", 0)
    with sanitize.recorded() as launches:
        for size in (3, 4):
            kernel = _cuda.load_kernel("scan/scan.cu", "scan_rows", {"SIZE": size, "OTHER": 7}, device=gpu)
            if size == 3:
                kernel((1, 1, 1), 32, [])
    assert launches.missing(("ops/scan/scan.cu:scan_rows", "ops/scan/scan.cu:scan_rows SIZE=3 OTHER=7")) == []
    others = ("ops/scan/scan.cu:scan_rows SIZE=4", "ops/scan/scan.cu:sum_rows", "ops/scan/scan.cu:scan_rows MORE=1")
    assert launches.missing(others) == list(others)


def test_a_case_that_launches_something_else_has_not_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CASES, "idle", Case(lambda: None, ("tlif/fused.py:_norms",)))
    assert sanitize.run_case("idle") == 1
    assert capsys.readouterr().out == "not launched: tlif/fused.py:_norms\n"


@on_cpu
def test_a_launch_with_other_settings_does_not_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CASES, "other", Case(CASES["tlif"].run, ("tlif/fused.py:_importance Q=32",)))
    assert sanitize.run_case("other") == 1
    assert "finished" not in capsys.readouterr().out
