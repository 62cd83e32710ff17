"""CUDA C++ kernels: compiled for the card at hand by NVRTC when first used, launched on torch's current stream.

Sources lie beside the ops (``ops/<op>/*.cu``), include nothing but files of their folder, and take their sizes as
macros. Machine code is kept on disk (`hisparse.ops._kept`) and can be compiled ahead (`hisparse.ops._ahead`).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import UnsupportedError
from hisparse.ops import _ahead, _kept

FOLDER = Path(__file__).parent
MINIMUM = (9, 0)
"""Least compute capability: the kernels copy with the bulk copy engine of Hopper and later."""


@cache
def has_compiler() -> bool:
    """True where CUDA's Python bindings are installed (``pip install hisparse[cuda]``)."""
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


@cache
def can_run(index: int | None) -> bool:
    """True where CUDA device `index` (None: the current one) can run these kernels."""
    return has_compiler() and torch.cuda.is_available() and torch.cuda.get_device_capability(index) >= MINIMUM


def _check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a call of the bindings; raises UnsupportedError for its error code."""
    code, *values = result
    if int(code) != 0:
        raise UnsupportedError(f"{what}: {code.name}; HISPARSE_BACKEND=triton does without CUDA C++ kernels")
    return values[0] if len(values) == 1 else values


def read_source(path: str) -> str:
    """The source `path` (under ops/), with what it includes from its folder in place."""
    file = FOLDER / path
    parts = re.split(r'^#include "(.*)"$', file.read_text(), flags=re.MULTILINE)
    for i in range(1, len(parts), 2):
        name = parts[i]
        parts[i] = f'#line 1 "{name}"\n{(file.parent / name).read_text()}#line 1 "{file.name}"'
    return "".join(parts)


def compile_source(source: str, name: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Machine code of `source` for `architecture` ("sm_90"). Needs no GPU.

    Raises UnsupportedError with the compiler's log where it does not compile.
    """
    from cuda.bindings import nvrtc

    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []), name)
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", "--restrict", *options]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if int(code) != 0:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program), name)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise UnsupportedError(
            f"{name} does not compile for {architecture}:\n{log.decode(errors='replace').rstrip(chr(0))}"
        )
    binary = b" " * _check(nvrtc.nvrtcGetCUBINSize(program), name)
    _check(nvrtc.nvrtcGetCUBIN(program, binary), name)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(binary)


@cache
def _compiler() -> str:
    """Name and version of the compiler."""
    from cuda.bindings import nvrtc

    return "NVRTC {}.{}".format(*_check(nvrtc.nvrtcVersion(), "NVRTC"))


def build(path: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Machine code of the source `path` (under ops/) for `architecture`, kept on disk. Raises as `compile_source`."""
    source = read_source(path)
    parts = (_compiler(), path, architecture, *options, source)
    return _kept.kept(parts, lambda: compile_source(source, path, architecture, options), _kept.default_folder())


class Kernel:
    """A function of a compiled source, on one device."""

    def __init__(self, binary: bytes, function: str) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream()  # makes the device's context current
        self._driver = driver
        self._module = _check(driver.cuModuleLoadData(binary), function)
        self._function = _check(driver.cuModuleGetFunction(self._module, function.encode()), function)
        self.name = function
        self._shared = 0
        self._resident: dict[tuple[int, int], int] = {}
        self._divided = False

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        kind = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        return int(_check(self._driver.cuFuncGetAttribute(kind, self._function), self.name))

    @property
    def spilled(self) -> int:
        """Bytes of local memory of a thread."""
        kind = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        return int(_check(self._driver.cuFuncGetAttribute(kind, self._function), self.name))

    def prefer_shared(self) -> Kernel:
        """Itself, asking for as much shared memory on a multiprocessor as there is, needed or not.

        Kernels that follow each other closely should agree in this: a multiprocessor is idle while it divides its
        memory anew into cache and shared memory, and programs that want it otherwise cannot be on it together.
        """
        if not self._divided:
            kind = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            _check(self._driver.cuFuncSetAttribute(self._function, kind, 100), self.name)
            self._divided = True
        return self

    def _allow_shared(self, size: int) -> None:
        """Lets programs have `size` bytes of dynamic shared memory; unasked it is 48 KiB less what is static."""
        if size > self._shared:
            kind = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(self._driver.cuFuncSetAttribute(self._function, kind, size), self.name)
            self._shared = size

    def resident(self, block: int, shared: int = 0) -> int:
        """How many programs of `block` threads and `shared` bytes a multiprocessor can have at the same time."""
        key = (block, shared)
        if key not in self._resident:
            try:
                self._allow_shared(shared)
            except UnsupportedError:  # more than there is
                self._resident[key] = 0
                return 0
            count = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, block, shared)
            self._resident[key] = int(_check(count, self.name))
        return self._resident[key]

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Tensor | int | float | None],
        shared: int = 0,
        overlap: bool = False,
        together: bool = False,
    ) -> None:
        """Launch on the current stream.

        args: tensors go as pointers (None: a null one), int as int32, float as float32. shared: dynamic shared memory,
        bytes. overlap: programs may start before the kernel ahead has ended; it is for the kernel itself to wait for
        that (``griddepcontrol.wait``) before it touches what the kernel ahead touches. together: all programs run at
        the same time or none, so that they can wait for each other; the device must have room for them all.
        """
        self._allow_shared(shared)
        values: list[int | float] = []
        kinds: list[Any] = []
        for arg in args:
            if arg is None or isinstance(arg, Tensor):
                values.append(0 if arg is None else arg.data_ptr())
                kinds.append(ctypes.c_void_p)
            elif isinstance(arg, float):
                values.append(arg)
                kinds.append(ctypes.c_float)
            else:
                values.append(int(arg))
                kinds.append(ctypes.c_int)
        stream = torch.cuda.current_stream().cuda_stream
        arguments = (tuple(values), tuple(kinds))
        if not overlap and not together:
            launched = self._driver.cuLaunchKernel(self._function, *grid, block, 1, 1, shared, stream, arguments, 0)
        else:
            config, kinds_of = self._driver.CUlaunchConfig(), self._driver.CUlaunchAttributeID
            attributes = []
            if overlap:
                attributes.append(self._driver.CUlaunchAttribute())
                attributes[-1].id = kinds_of.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                attributes[-1].value.programmaticStreamSerializationAllowed = 1
            if together:
                attributes.append(self._driver.CUlaunchAttribute())
                attributes[-1].id = kinds_of.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
                attributes[-1].value.cooperative = 1
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
            config.sharedMemBytes, config.hStream = shared, stream
            config.attrs, config.numAttrs = attributes, len(attributes)
            launched = self._driver.cuLaunchKernelEx(config, self._function, arguments, 0)
        _check(launched, self.name)


class _Idle(Kernel):
    """Stands for a kernel that is compiled ahead: launches nothing. It is taken to fit the device."""

    def __init__(self, function: str) -> None:
        self.name = function

    def prefer_shared(self) -> Kernel:
        return self

    def resident(self, block: int, shared: int = 0) -> int:
        return 1

    def __call__(self, *launch: Any, **how: Any) -> None:
        return


Macros = tuple[tuple[str, int], ...]


@cache
def _architecture(index: int) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))


def _build(path: str, macros: Macros, registers: int | None, architecture: str) -> bytes:
    options = [f"--define-macro={name}={value}" for name, value in macros]
    if registers is not None:
        options.append(f"--maxrregcount={registers}")
    return build(path, architecture, options)


@cache
def _load(path: str, function: str, macros: Macros, registers: int | None, index: int) -> Kernel:
    program = path, macros, registers, _architecture(index)
    binary = _ahead.taken(program, lambda: _build(*program))
    with torch.cuda.device(index):
        return Kernel(binary, function)


def load_kernel(
    path: str,
    function: str,
    defines: dict[str, int] | None = None,
    registers: int | None = None,
    device: torch.device | None = None,
) -> Kernel:
    """`function` of the source `path` (under ops/), compiled once for each device and choice of macros.

    registers: the most a thread may use. device: None means the current one. Raises UnsupportedError where it does not
    compile or load. A thread that compiles ahead gets a kernel that launches nothing.
    """
    macros = tuple(sorted((defines or {}).items()))
    pool = _ahead.current()
    if pool is not None:
        program = path, macros, registers, _architecture(pool.index)
        pool.add(program, lambda: _build(*program))
        return _Idle(function)
    index = device.index if device is not None and device.index is not None else torch.cuda.current_device()
    return _load(path, function, macros, registers, index)
