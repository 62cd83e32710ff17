"""Timing, and the card's own speeds: the yardsticks of every benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import HiSparseError, UnsupportedError

L2_BYTES = 256 << 20
"""Buffers that a timed loop goes through are together larger than this, several times any card's L2 cache."""


class WrongResult(HiSparseError):  # noqa: N818 - what it is, in the words of the user
    """A kernel's result is not what its reference gives."""


def check(what: str, error: float, tolerance: float) -> float:
    """`error` itself. Raises WrongResult where it is above `tolerance` or NaN: then no speed is given."""
    if not error <= tolerance:
        raise WrongResult(
            f"{what}: relative error {error:.2e}, more than {tolerance:.0e}; no speed is given. Run the tests under "
            "tests/ on this machine and report what fails"
        )
    return error


def require_cuda(bench: str) -> torch.device:
    """The CUDA device. Raises UnsupportedError without one, or without Triton."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"bench {bench} measures GPU kernels and PyTorch finds no CUDA device here; run it on a machine with an "
            "NVIDIA GPU, or use `hisparse bench plan` and `hisparse bench tlif`, which run on a CPU too"
        )
    try:
        import triton  # noqa: F401
    except ImportError:
        raise UnsupportedError(f"bench {bench} needs Triton; install it: pip install triton") from None
    return torch.device("cuda", torch.cuda.current_device())


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def graph_ms(calls: Sequence[Callable[[], Any]], target_ms: float = 12.0, repeats: int = 7) -> float:
    """Median milliseconds of one call: replays of a CUDA graph in which `calls` follow each other, again and again."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is compiled or allocated at a first call is so outside the capture
        for call in calls:
            call()
    torch.cuda.synchronize()
    begin, end = _events()
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(50, int(target_ms / max(begin.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / (rounds * len(calls)))
    return statistics.median(times)


def event_ms(call: Callable[[], Any], repeats: int = 5, warm: int = 1) -> float:
    """Median milliseconds of one call on the device, for work of milliseconds that no graph holds (host copies)."""
    for _ in range(warm):
        call()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = _events()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def wall_ms(call: Callable[[], Any], device: torch.device, repeats: int = 9, warm: int = 2) -> float:
    """Median wall-clock milliseconds of one call, the device's queue empty before and after."""
    times = []
    for turn in range(repeats + warm):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= warm:
            times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def relative(found: Tensor, want: Tensor) -> float:
    """|| found - want || / || want ||; NaN stays NaN."""
    return float((found.double() - want.double()).norm() / want.double().norm())


def read_bandwidth(device: torch.device, size: int = 1 << 31) -> float:
    """Bytes a second of a kernel that only reads; the best of a few shapes."""
    from hisparse.bench.kernels import read_all

    x = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    best = min(
        graph_ms([lambda b=block, w=warps, p=programs: read_all(x, p, b, w)])  # type: ignore[misc]
        for block, warps, programs in ((4096, 8, 1056), (8192, 8, 528), (2048, 4, 2112))
    )
    return size / best * 1e3


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second, read and written, of a kernel that only copies; the best of a few shapes."""
    from hisparse.bench.kernels import copy_all

    x = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    y = torch.empty_like(x)
    best = min(
        graph_ms([lambda b=block, w=warps, p=programs: copy_all(x, y, p, b, w)])  # type: ignore[misc]
        for block, warps, programs in ((4096, 8, 1056), (2048, 4, 2112), (4096, 4, size // 16384))
    )
    return 2 * size / best * 1e3


def pinned_bandwidth(device: torch.device, size: int = 1 << 28) -> float:
    """Bytes a second of a copy from pinned host memory to the device."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    x = torch.empty(size, dtype=torch.uint8, device=device)
    return size / event_ms(lambda: x.copy_(host, non_blocking=True)) * 1e3


def dense_decode_ms(q: Tensor, heads: int, context: int) -> float:
    """Milliseconds of dense bfloat16 decode attention of q [1, Hq, 1, D] over `context` tokens of `heads` KV heads."""
    dim = q.shape[3]
    sets = max(1, -(-L2_BYTES // (4 * heads * context * dim)))
    kv = [torch.randn(2, 1, heads, context, dim, dtype=torch.bfloat16, device=q.device) for _ in range(sets)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return graph_ms([lambda x=x: attend(q, x[0], x[1], enable_gqa=True) for x in kv])  # type: ignore[misc]
