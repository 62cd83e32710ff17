"""Speed of packing, of the peak test and of unpacking on this machine: ``python -m hisparse.vtq.benchmark``.

One thread; the processor time of that thread (wall time on a GPU), so that other processes disturb it little. The copy
of the unpacked tensors, measured in the same run, says how far unpacking is from merely moving its result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from hisparse.config import VtqConfig
from hisparse.ops.pack import pack_pages
from hisparse.ops.unpack import unpack_pages
from hisparse.vtq.format import PageFormat
from hisparse.vtq.peaks import peak_separation
from hisparse.vtq.stats import ChannelStats

SHAPES = (  # heads, head_dim, tokens a page, pages
    (3, 64, 8, 94),
    (3, 64, 4, 128),
    (3, 64, 8, 1000),
    (8, 128, 8, 94),
    (8, 128, 8, 1000),
)


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Median over `repeats` runs after one to warm up."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - begin)
    return sorted(times)[repeats // 2] * 1e3


def measure(
    heads: int, dim: int, tokens: int, pages: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Milliseconds to pack by rule, to unpack and to copy `pages` pages; microseconds a block of the peak test."""
    fmt = PageFormat.vtq(VtqConfig(), heads, dim, tokens)
    make = torch.Generator(device).manual_seed(0)
    k, v = torch.randn(2, pages, tokens, heads, dim, generator=make, device=device).to(dtype)
    quarter = torch.arange(dim) // (dim // 4)
    order = torch.argsort((quarter % 2 == 0).long(), stable=True)  # a half-split model's
    stats = ChannelStats.identity(heads, dim, order).to(device)
    packed = pack_pages(k, v, stats, fmt)
    blocks = torch.randn(pages * heads * fmt.groups, tokens * fmt.group, generator=make, device=device)
    unpack = milliseconds(lambda: unpack_pages(packed, stats, fmt, dtype), device)
    return {
        "rope": milliseconds(lambda: pack_pages(k, v, stats, fmt, "rope"), device),
        "never": milliseconds(lambda: pack_pages(k, v, stats, fmt, "never"), device),
        "peaks": milliseconds(lambda: pack_pages(k, v, stats, fmt, "peaks"), device),
        "test": milliseconds(lambda: peak_separation(blocks), device) * 1e3 / len(blocks),
        "unpack": unpack,
        "value": unpack * 1e6 / (2 * k.numel()),
        "copy": milliseconds(lambda: (k.clone(), v.clone()), device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of packing and unpacking.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    torch.set_num_threads(1)
    print("                           |             pack, ms       | peak test |    unpack      |  copy")
    print("heads x dim  tokens  pages |     rope    never    peaks  | us/block  |   ms  ns/value  |   ms")
    for heads, dim, tokens, pages in SHAPES:
        numbers = measure(heads, dim, tokens, pages, device, dtype)
        print(
            f"{heads:5d} x {dim:3d}  {tokens:6d}  {pages:5d} | {numbers['rope']:8.2f} {numbers['never']:8.2f} "
            f"{numbers['peaks']:8.2f}  | {numbers['test']:8.2f}  | {numbers['unpack']:6.2f}  {numbers['value']:6.2f} | "
            f"{numbers['copy']:6.2f}"
        )


if __name__ == "__main__":
    main()
