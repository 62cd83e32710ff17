"""Packing, unpacking and sketch building on a GPU: checked against the reference on the CPU, then timed.

``PYTHONPATH=src python benchmarks/bench_pack.py --out benchmarks/results/h200-pack.json``
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, graph_ms, read_bandwidth, relative, row, save
from torch import Tensor

from hisparse.ops.pack import reference as pack_plain
from hisparse.ops.pack import triton as pack_twin
from hisparse.ops.sketch import reference as sketch_plain
from hisparse.ops.sketch.triton import build_sketch
from hisparse.ops.unpack import reference as unpack_plain
from hisparse.ops.unpack import triton as unpack_twin
from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats, estimate_stats

SAMPLE = 48


EACH = ((1, 1), (2, 1), (4, 1), (4, 2))
"""Pages and warps a program, to try."""


def time_pages(
    shape: str, x: Tensor, stats: ChannelStats, cpu: ChannelStats, fmt: PageFormat, bandwidth: float
) -> list[dict[str, Any]]:
    """Packing and unpacking of x [K and V, H, tokens, D]."""
    heads, context, dim = x.shape[1:]
    what = f"{fmt.tokens} tokens a page, K {fmt.k_bits} V {fmt.v_bits} bits"
    k, v = (y.view(heads, -1, fmt.tokens, dim).permute(1, 2, 0, 3) for y in x)
    few = torch.arange(0, len(k), len(k) // SAMPLE)[:SAMPLE].cuda()
    packed = pack_twin.pack_pages(k, v, stats, fmt, "rope", 0.15)
    expected = pack_plain.pack_pages(k[few].cpu(), v[few].cpu(), cpu, fmt, "rope", 0.15)
    differ = int((packed[few].cpu() != expected).sum())
    if differ:
        raise SystemExit(f"pack: {differ} of {expected.numel()} bytes differ from the reference's")
    times = [
        graph_ms([lambda e=each, w=warps: pack_twin.pack_pages(k, v, stats, fmt, "rope", 0.15, each=e, warps=w)])  # type: ignore[misc]
        for each, warps in EACH
    ]
    ms, moved = min(times), x.nbytes + packed.nbytes
    ours = unpack_twin.unpack_pages(packed[few], stats, fmt, torch.float32)
    theirs = unpack_plain.unpack_pages(expected, cpu, fmt, torch.float32)
    error = max(relative(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
    if not error < 1e-6:
        raise SystemExit(f"unpack: relative error {error:.1e}")
    back = graph_ms([lambda: unpack_twin.unpack_pages(packed, stats, fmt, torch.bfloat16)])
    print(
        f"{shape} {what}: pack {ms:.3f} ms = {x.nbytes / ms / 1e9:.2f} TB/s in, variants "
        f"{' '.join(f'{t:.3f}' for t in times)}; unpack {back:.3f} ms, {moved / back / 1e9:.2f} TB/s",
        flush=True,
    )
    part = [round(moved / t * 1e3 / bandwidth, 3) for t in (ms, back)]
    return [
        row("pack", shape, context, ms, bytes=x.nbytes, what=what, error=0.0, bandwidth_fraction=part[0],
            tera_in=round(x.nbytes / ms / 1e9, 3), each=EACH[times.index(ms)]),
        row("unpack", shape, context, back, bytes=moved, what=what, error=float(f"{error:.1e}"),
            bandwidth_fraction=part[1]),
    ]  # fmt: skip


def time_sketches(
    shape: str, k: Tensor, stats: ChannelStats, cpu: ChannelStats, bits: int, bandwidth: float
) -> dict[str, Any]:
    """Building of the sketches of k [H, tokens, D]."""
    heads, context, dim = k.shape
    keys = k.view(heads, -1, 4, dim).permute(1, 2, 0, 3)
    codes, scales = build_sketch(keys, stats, bits)
    few = torch.arange(0, len(keys), len(keys) // 1024)[:1024].cuda()
    other, other_scales = sketch_plain.build_sketch(keys[few].cpu(), cpu, bits)
    same = (scales[few].cpu() == other_scales).all(-1)
    equal = float((codes[few].cpu()[same] == other[same]).float().mean()) * float(same.float().mean())
    if equal < 0.98:
        raise SystemExit(f"sketches: only {equal:.2%} of the bytes are the reference's")
    ms = graph_ms([lambda: build_sketch(keys, stats, bits)])
    moved = k.nbytes + codes.nbytes + scales.nbytes
    print(f"{shape} sketch of {bits} bits: {ms:.3f} ms, {moved / ms / 1e9:.2f} TB/s; {equal:.3%} equal", flush=True)
    part = round(moved / ms * 1e3 / bandwidth, 3)
    error = round(1 - equal, 5)
    return row(
        "sketch-build", shape, context, ms, bytes=moved, what=f"{bits} bits", error=error, bandwidth_fraction=part
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Packing, unpacking and sketch building.")
    parser.add_argument("--shapes", nargs="+", default=["glm4-9b-1m", "llama3.1-8b"])
    parser.add_argument("--context", type=int, default=1 << 19)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bandwidth = read_bandwidth()
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        _, heads, dim = SHAPES[shape]
        make = torch.Generator("cuda").manual_seed(0)
        x = torch.randn((2, heads, options.context, dim), generator=make, device="cuda", dtype=torch.bfloat16)
        x *= torch.rand(dim, generator=make, device="cuda") * 2 + 0.3
        x += torch.randn(2, heads, 1, dim, generator=make, device="cuda") * 4
        order = torch.cat([torch.arange(dim).view(2, 2, -1)[:, i].flatten() for i in (1, 0)])  # half-split RoPE
        sample = x[:, :, :8192].cpu().transpose(1, 2)
        cpu = estimate_stats(sample[0], sample[1], order)
        stats = cpu.to("cuda")
        for tokens, v_bits in ((8, 5), (4, 5), (8, 4)):
            rows += time_pages(shape, x, stats, cpu, PageFormat(tokens, heads, dim, 5, v_bits, 64), bandwidth)
        rows += [time_sketches(shape, x[0], stats, cpu, bits, bandwidth) for bits in (2, 1)]
    if options.out:
        save(rows, options.out, bandwidth)


if __name__ == "__main__":
    main()
