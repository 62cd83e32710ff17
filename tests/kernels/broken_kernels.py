"""Two kernels that Triton compiles for a GPU that is not there; one of them it cannot."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

launchers: list[str] = []


@triton.jit
def good(p_x, n: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(p_x + tl.arange(0, n), 1.0)


@triton.jit
def bad(p_x, n: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(p_x + tl.arange(0, n), nowhere)  # noqa: F821


def main() -> None:
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            launcher_cls=lambda source, _: launchers.append(source.name),
        )
    )
    from hisparse.ops import _ahead

    sys.modules["hisparse.two_kernels"] = sys.modules[__name__]
    x = torch.empty(64, device="meta")

    def call() -> None:
        for kernel in (good, bad, good):
            kernel[(1,)](x, 64)

    background = _ahead.Background(call, 0, 2)
    background.join()
    compiled = [len(kernel.device_caches[0][0]) for kernel in (good, bad)]
    assert background.error is None, background.error
    assert compiled == [1, 0], compiled
    assert launchers == ["good"], launchers
    assert not [kernel for kernel in (good, bad) if "run" in vars(kernel)]
    try:
        bad[(1,)](x, 64)
    except triton.compiler.errors.CompilationError as error:
        assert "nowhere" in str(error)  # noqa: PT017 - no test framework here
    else:
        raise AssertionError("a kernel that does not compile was launched")
    print("done")


if __name__ == "__main__":
    main()
