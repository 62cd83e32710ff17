"""Time of planning against sequence length, and importance covered beside fixed blocks.

    python benchmarks/plan_blocks.py [--device cuda] [--importance FILE.npy] [--lengths 131072 1048576]

Synthetic importance unless a file is given (then its first tokens). Times are the median of `--repeats` plans after two
unmeasured ones; the limit is a tenth of the tokens. `fixed` is the same with whole 64-token blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from hisparse.blgs import plan_blocks, plan_fixed_blocks, synthetic_importance
from hisparse.blgs.compare import compare
from hisparse.cli.plan import read_importance
from hisparse.config import HiSparseConfig


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time of `call`, the device's queue empty before and after."""
    times = []
    for turn in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 2:
            times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    """Print one line a length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--importance", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 5, 8, 64, 1024, 8192, 131072, 1 << 20])
    parser.add_argument("--threshold", type=float, help="instead of the configuration's law")
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    device, config = torch.device(arguments.device), HiSparseConfig()
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, {arguments.channels} channels")
    print(
        f"{'tokens':>9} {'plan ms':>9} {'limit ms':>9} {'fixed ms':>9} {'modes':>6} {'blocks':>7} {'tiles':>8} "
        f"{'kept':>7}   importance kept: plan / fixed / best tokens; tokens fixed needs for as much"
    )
    whole = None if arguments.importance is None else read_importance(arguments.importance)
    for length in arguments.lengths:
        p = (synthetic_importance(length) if whole is None else whole[:length]).to(device)
        length, channels = p.shape[0], arguments.channels
        threshold = arguments.threshold or config.tlif.threshold(length)
        limit = length // 10
        free = milliseconds(partial(plan_blocks, p, threshold, config.blgs, channels), device, arguments.repeats)
        call = partial(plan_blocks, p, threshold, config.blgs, channels, limit)
        bound = milliseconds(call, device, arguments.repeats)
        fixed = milliseconds(partial(plan_fixed_blocks, p, 64, limit), device, arguments.repeats)
        plan = plan_blocks(p, threshold, config.blgs, channels)
        found = compare(plan, p)
        masses = " / ".join(f"{found[key].mass:.3f}" for key in ("plan", "fixed", "tokens"))
        ratio = found["fixed, equal mass"].kept / max(plan.n_kept, 1)
        print(
            f"{length:>9} {free:>9.3f} {bound:>9.3f} {fixed:>9.3f} {len(plan.modes):>6} {plan.n_blocks:>7} "
            f"{plan.n_tiles:>8} {plan.density:>7.2%}   {masses}; x{ratio:.2f}"
        )


if __name__ == "__main__":
    main()
