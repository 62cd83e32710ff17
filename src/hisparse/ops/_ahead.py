"""Compiling kernels before they are needed, in background threads.

Which kernels a model needs follows from its shapes, but where that is worked out is the operations themselves. So they
are called with tensors of the meta device, which have shapes and strides and no memory: in a thread that compiles
ahead, such tensors stand for those of a GPU, and a kernel that is called is compiled by a pool of threads and not
launched. What was not foreseen, or did not compile, is compiled when it is first launched, as if there were no such
thread: there errors are raised.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

logger = logging.getLogger("hisparse")

MOST_THREADS = 16


class Pool:
    """Compiles programs of CUDA C++, each once, and gives them to whoever loads them. index: the CUDA device."""

    def __init__(self, executor: ThreadPoolExecutor, index: int) -> None:
        self.executor, self.index = executor, index

    def add(self, key: Any, build: Callable[[], bytes]) -> None:
        with _LOCK:
            if key not in _PROGRAMS:
                _PROGRAMS[key] = self.executor.submit(build)


_CURRENT: ContextVar[Pool | None] = ContextVar("hisparse_compiling_ahead", default=None)
_PROGRAMS: dict[Any, Future[bytes]] = {}
_LOCK = threading.Lock()


def current() -> Pool | None:
    """What compiles for this thread; None where it launches kernels, as usual."""
    return _CURRENT.get()


def taken(key: Any, build: Callable[[], bytes]) -> bytes:
    """Machine code of program `key`: compiled ahead, waiting for it if need be, else built now. Raises as `build`."""
    with _LOCK:
        future = _PROGRAMS.pop(key, None)
    return build() if future is None else future.result()


def device_of(device: torch.device) -> torch.device:
    """The device that tensors on `device` stand for."""
    pool = current()
    return torch.device("cuda", pool.index) if device.type == "meta" and pool is not None else device


def _kernels() -> list[Any]:
    """Triton's kernels in the modules of this package that are loaded; none where its interpreter runs them."""
    from triton.runtime.jit import JITFunction

    found: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("hisparse."):
            found |= {id(x): x for x in list(vars(module).values()) if isinstance(x, JITFunction)}
    return list(found.values())


def _compiling(kernel: Any) -> Callable[..., Any]:
    """In place of `kernel.run`, which compiles and launches: only compiles, for threads that compile ahead."""
    launch = kernel.run

    def run(*args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(*args, grid=grid, warmup=warmup or current() is not None, **options)

    return run


@contextmanager
def _triton(executor: ThreadPoolExecutor) -> Iterator[None]:
    """Within, what this thread launches of this package's Triton kernels is compiled by `executor`; on leaving, all of
    it is."""
    import triton

    class Mode(triton.AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: Any, compile_fn: Callable[[], Any], *rest: Any) -> Any:
            def build() -> Any:
                kernel = compile_fn()
                _prepare_launch(kernel)
                return kernel

            return super().submit(key, build, *rest)

    kernels = _kernels()
    for kernel in kernels:
        kernel.run = _compiling(kernel)
    try:
        with Mode(executor, ignore_errors=True):
            yield
    finally:
        for kernel in kernels:
            del kernel.run  # the class's again
            for cache, *_ in list(kernel.device_caches.values()):
                # Triton 3.7 keeps what did not compile, and would raise that error at every launch.
                for key in [key for key, made in list(cache.items()) if isinstance(made, triton.FutureKernel)]:
                    del cache[key]


def _prepare_launch(kernel: Any) -> None:
    """Make what launches `kernel`: Triton up to 3.7 has the C compiler make it, and keeps it on disk."""
    from triton.runtime.driver import driver

    try:
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    except Exception as error:  # whatever it is, it is raised again where the kernel is launched
        logger.debug("%s cannot be launched yet: %s", kernel.src.name, error)


class Background:
    """A thread in which `call` runs with its kernels compiled and not launched.

    index: the CUDA device. It begins at once; an error of `call` is logged and costs nothing but time.
    """

    def __init__(self, call: Callable[[], None], index: int, threads: int | None = None) -> None:
        self.error: Exception | None = None
        self._call, self._index = call, index
        self._threads = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._thread = threading.Thread(target=self._run, name="hisparse-compile", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until everything is compiled."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                executor = stack.enter_context(ThreadPoolExecutor(self._threads, "hisparse-compile"))
                if torch.cuda.is_available():
                    stack.enter_context(torch.cuda.device(self._index))
                stack.enter_context(_triton(executor))
                stack.enter_context(torch.no_grad())
                token = _CURRENT.set(Pool(executor, self._index))
                try:
                    self._call()
                finally:
                    _CURRENT.reset(token)
        except Exception as error:  # a guess at what will be needed must not stop what needs it
            self.error = error
            logger.warning("kernels compile when they are first used: compiling them ahead failed (%s)", error)
