"""Runs kernels in CUDA C++ on a CPU, thread by thread, so that their tests need no GPU.

A source is translated to C++, compiled by g++ together with the model of a device in ``device.h``, and launched with
the arguments of :class:`hisparse.ops._cuda.Kernel`. Inline assembly is read as what it is: each PTX instruction becomes
a call of its model in ``instructions.h``, its operands in PTX's order; one without a model is an error.

What shows up here: wrong indices and layouts, missing or superfluous barriers, copies that are not waited for, rings
that are too short, accesses beyond shared memory, lanes of a warp that go different ways. What does not: time,
registers, and what only the hardware's weaker order of memory accesses can bring about. Launches that overlap the
kernel ahead see memory as it was before that kernel until they wait for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hisparse.ops._cuda import read_source

HERE = Path(__file__).parent
WATCHED = 1 << 28
"""Most bytes of a tensor whose changes are followed: larger ones, launches that overlap see as they are."""
COMPILER = shutil.which("g++")
INSTRUCTIONS = [  # PTX, its model
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32", "mma<false>"),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32", "mma<true>"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x[24]\.trans\.shared\.b16", "ldmatrix_trans"),
    (r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", "movmatrix_trans"),
    (r"mbarrier\.init\.shared::cta\.b64", "mbarrier_init"),
    (r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64", "mbarrier_expect"),
    (r"mbarrier\.arrive\.shared::cta\.b64", "mbarrier_arrive"),
    (r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?", "bulk_copy"),
    (r"cp\.async\.c[ag]\.shared\.global(\.L2::cache_hint)?", "cp_async"),
    (r"cp\.async\.commit_group", "cp_async_commit"),
    (r"cp\.async\.wait_group", "cp_async_wait"),
    (r"ld\.shared\.(v[24]\.)?u32", "ld_shared"),
    (r"ld\.shared\.u16", "ld_shared_u16"),
    (r"st\.shared\.(v4\.)?[uf]32", "st_shared"),
    (r"atom\.(?:relaxed|acq_rel)\.cta\.shared::cta\.add\.u32", "atom_add_shared"),
    (r"mapa\.shared::cluster\.u32", "mapa"),
    (r"ld\.shared::cluster\.u32", "ld_cluster"),
    (r"st\.shared::cluster\.u32", "st_cluster_u32"),
    (r"st\.shared::cluster\.u64", "st_cluster_u64"),
    (r"ld\.relaxed\.gpu\.global\.s32", "ld_global"),
    (r"ld\.global(\.nc)?(\.L1::no_allocate)?(\.v[24])?\.[us]32", "ld_global"),
    (r"ld\.(relaxed|acquire)\.gpu\.global\.(v4\.)?u(32|64)", "hear"),
    (r"st\.relaxed\.gpu\.global\.u(32|64)", "tell"),
    (r"ex2\.approx\.ftz\.f32", "ex2"),
    (r"lg2\.approx\.ftz\.f32", "lg2"),
    (r"sqrt\.approx\.ftz\.f32", "sqrt_"),
    (r"min\.NaN\.f32", "min_nan"),
    (r"max\.NaN\.f32", "max_nan"),
    (r"cvt\.rn\.f16x2\.f32", "cvt_f16x2"),
    (r"cvt\.rn\.bf16x2\.f32", "cvt_bf16x2"),
    (r"cvt\.rn\.f16\.f32", "cvt_to_f16"),
    (r"cvt\.f32\.f16", "cvt_from_f16"),
    (r"mul\.f16x2", "mul_f16x2"),
    (r"bar\.sync", "bar_sync"),
    (r"barrier\.cluster\.arrive\.release(\.aligned)?", "cluster_arrive"),
    (r"barrier\.cluster\.wait\.acquire(\.aligned)?", "cluster_wait"),
    (r"griddepcontrol\.wait", "wait_for_kernel_ahead"),
    # Memory accesses are in order here, and a hint changes no result.
    (r"fence\..*|griddepcontrol\.launch_dependents|createpolicy\..*", "nothing"),
]


def _closing(text: str, at: int) -> int:
    """Where the bracket that opens at `at` closes; strings are skipped."""
    depth = 0
    while at < len(text):
        c = text[at]
        if c == '"':
            at += 1
            while text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if not depth:
                return at
        at += 1
    raise ValueError("a bracket does not close")


def _split(text: str, separator: str) -> list[str]:
    """`text` at separators outside brackets and strings."""
    parts, start, at = [], 0, 0
    while at < len(text):
        if text[at] == '"':
            at += 1
            while text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        elif text[at] in "([{":
            at = _closing(text, at)
        elif text[at] == separator:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [*parts, text[start:]]


def _assembly(body: str) -> str:
    """C++ for what stands between the brackets of an ``asm`` statement."""
    sections = _split(body, ":")
    code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0])).replace("\\n", " ")
    operands = []
    for section in sections[1:3]:
        for operand in _split(section, ","):
            found = re.fullmatch(r'\s*"[^"]*"\s*\((.*)\)\s*', operand, re.S)
            if found:
                operands.append(found[1].strip())

    def named(token: str) -> str:
        return f"({operands[int(token[1:])]})" if token[0] == "%" else token

    if "mbarrier.try_wait.parity.shared::cta.b64" in code:  # in a loop until it is done
        return f"ptx::mbarrier_wait({named('%0')}, {named('%1')});"
    half = re.search(r"mov\.b32 \{a, b\}, %1; *cvt\.f32\.f16 %0, ([ab]);", code)
    if half:
        return f"ptx::cvt_from_f16({named('%0')}, (unsigned short)({named('%1')} >> {16 * (half[1] == 'b')}));"
    calls = []
    for instruction in code.split(";"):
        instruction = instruction.strip()
        if not instruction:
            continue
        opcode, *rest = instruction.split(None, 1)
        model = next((model for pattern, model in INSTRUCTIONS if re.fullmatch(pattern, opcode)), None)
        if model is None:
            raise NotImplementedError(f"no model of {opcode}; add one to instructions.h and emulator.py")
        tokens = re.findall(r"%\d+|\b0x[0-9a-fA-F]+|\b\d+\b", rest[0] if rest and model != "nothing" else "")
        calls.append(f"ptx::{model}({', '.join(named(token) for token in tokens)});")
    return " ".join(calls)


def _translate_assembly(source: str) -> str:
    out, at = [], 0
    for found in re.finditer(r"\basm(\s+volatile)?\s*\(", source):
        if found.start() < at:
            continue
        end = _closing(source, found.end() - 1)
        out += [source[at : found.start()], "{ ", _assembly(source[found.end() : end]), " }"]
        at = end + 1
    return "".join([*out, source[at:]])


def _translate_shared(source: str) -> str:
    source = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)emu::dynamic_shared();", source
    )
    number = iter(range(10**6))

    def variables(found: re.Match[str]) -> str:
        kind, names = found[1], re.findall(r"(?:^|,)\s*(\w+)", re.sub(r"\[[^\]]*\]", "", found[2]))
        site = next(number)
        lines = [f"struct Site{site} {{ {kind} {found[2]}; }};"]
        lines.append(f"Site{site}& site{site} = emu::shared_variable<Site{site}>({site});")
        lines += [f"auto& {name} = site{site}.{name};" for name in names]
        return " ".join(lines)

    return re.sub(r"__shared__ (\w+) ([^;]+);", variables, source)


def translate(source: str) -> str:
    """C++ with functions ``launch_<kernel>`` that launch the kernels of a source."""
    source = re.sub(r"//[^\n]*", "", source)
    source = _translate_shared(_translate_assembly(source))
    launches = []
    for head in re.finditer(r'extern "C" __global__ void\s+([^;{]*?)\b(?!__)(\w+)\s*\((?!\s*\w+\s*[,)])', source):
        end = _closing(source, head.end() - 1)
        parameters = source[head.end() : end]
        names = ", ".join(re.findall(r"\w+", p)[-1] for p in parameters.split(","))
        cluster = re.search(r"__cluster_dims__\((\w+)", head[1])
        launches.append(
            f'extern "C" const char* launch_{head[2]}(unsigned x, unsigned y, unsigned z, unsigned threads, '
            f"unsigned shared, unsigned seed, unsigned together, {parameters}) {{ return emu::launch(x, y, z, threads, "
            f"shared, together ? x : {cluster[1] if cluster else 1}, seed, [=] {{ {head[2]}({names}); }}); }}"
        )
    return "\n".join(['#include "model.h"', source, *launches, KNOWN])


KNOWN = """
extern "C" void emu_know(const char* begin, size_t size) { emu::device.known.push_back({begin, begin + size}); }
extern "C" void emu_forget() { emu::device.known.clear(), emu::device.hidden.clear(); }
extern "C" void emu_hide(char* at, const char* old, size_t size) {
  emu::device.hidden.push_back({at, {old, old + size}});
}
"""


OPTIONS = (
    "-O1",
    "-march=native",
    "-std=c++20",
    "-w",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fPIC",
    f"-I{HERE}",
)


def _gcc(*arguments: str | Path) -> None:
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *OPTIONS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments[-1]} does not compile:\n{done.stderr[:4000]}")


@cache
def _folder() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """Where binaries go, with the model of the device as a precompiled header. Removed at exit."""
    temporary = tempfile.TemporaryDirectory(prefix="emulator-")
    header = Path(temporary.name) / "model.h"
    header.write_text('#include "device.h"\n#include "instructions.h"\n')
    _gcc("-o", header.with_suffix(".h.gch"), "-x", "c++-header", header)
    return Path(temporary.name), temporary


@cache
def _compile(text: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    folder, _ = _folder()
    name = hashlib.sha1(repr((text, defines)).encode()).hexdigest()[:16]
    source = folder / f"{name}.cpp"
    source.write_text(text)
    binary = source.with_suffix(".so")
    _gcc(*(f"-D{key}={value}" for key, value in defines), f"-I{folder}", "-shared", "-o", binary, source)
    library = ctypes.CDLL(str(binary))
    library.emu_know.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.emu_hide.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    return library


class EmulatedKernel:
    """Takes the place of :class:`hisparse.ops._cuda.Kernel`. Raises AssertionError for what a launch does wrong."""

    seed = 0
    """Of the next launch; counts up from launch to launch."""
    registers = spilled = 0
    _changed: tuple[tuple[torch.UntypedStorage, bytes, bytes], ...] = ()
    """By the last launch of any kernel: memory, what it held before, and after."""

    def __init__(self, source: str, function: str, defines: dict[str, int]) -> None:
        self.name = function
        self._library = _compile(translate(source), tuple(sorted(defines.items())))
        self._launch = getattr(self._library, f"launch_{function}")
        self._launch.restype = ctypes.c_char_p

    def prefer_shared(self) -> EmulatedKernel:
        return self

    def resident(self, block: int, shared: int = 0) -> int:
        return 1

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Tensor | int | float | None],
        shared: int = 0,
        overlap: bool = False,
        together: bool = False,
    ) -> None:
        values: list[ctypes.c_void_p | ctypes.c_float | ctypes.c_int] = []
        storages: dict[int, torch.UntypedStorage] = {}
        for arg in args:
            if isinstance(arg, Tensor):
                storages[arg.untyped_storage().data_ptr()] = arg.untyped_storage()
                values.append(ctypes.c_void_p(arg.data_ptr()))
            elif arg is None:
                values.append(ctypes.c_void_p(0))
            else:
                values.append(ctypes.c_float(arg) if isinstance(arg, float) else ctypes.c_int(arg))
        self._library.emu_forget()
        for storage in storages.values():
            self._library.emu_know(storage.data_ptr(), storage.nbytes())
        if overlap:  # the kernel ahead may not have ended: unless other work came between
            for storage, old, new in EmulatedKernel._changed:
                if _bytes(storage) == new:
                    self._library.emu_hide(storage.data_ptr(), old, len(old))
        watched = [storage for storage in storages.values() if storage.nbytes() <= WATCHED]
        before = [_bytes(storage) for storage in watched]
        EmulatedKernel.seed += 1
        sizes = [ctypes.c_uint(n) for n in (*grid, block, shared, EmulatedKernel.seed, together)]
        message = self._launch(*sizes, *values)
        assert not message, f"{self.name}, seed {EmulatedKernel.seed}: {message.decode()}"
        after = [_bytes(storage) for storage in watched]
        EmulatedKernel._changed = tuple(
            (storage, old, new) for storage, old, new in zip(watched, before, after, strict=True) if old != new
        )


def behind(*tensors: Tensor) -> None:
    """Has the next launch that overlaps see these tensors full of nonsense until it waits, as if the kernel ahead wrote
    them and nothing else."""
    EmulatedKernel._changed = tuple(
        (x.untyped_storage(), b"\x55" * x.untyped_storage().nbytes(), _bytes(x.untyped_storage())) for x in tensors
    )


def _bytes(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def load_kernel(
    path: str,
    function: str,
    defines: dict[str, int] | None = None,
    registers: int | None = None,
    device: torch.device | None = None,
) -> EmulatedKernel:
    """Takes the place of :func:`hisparse.ops._cuda.load_kernel`."""
    return EmulatedKernel(read_source(path), function, defines or {})
