"""Packing and unpacking of K and V: the reference's bytes first, then bytes a second."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from hisparse.bench.data import make_layer, pages_of
from hisparse.bench.measure import WrongResult, check, graph_ms, relative
from hisparse.bench.results import make_row
from hisparse.bench.shapes import SHAPES
from hisparse.bench.twins import name_of, twin
from hisparse.ops.pack import reference as plain_pack
from hisparse.ops.unpack import reference as plain_unpack
from hisparse.vtq.format import PageFormat

SAMPLE = 48  # pages that are packed on the CPU too
VARIANTS = ((1, 1), (2, 1), (4, 1), (4, 2))
"""Pages and warps a program of the Triton twin."""
FORMATS = ((4, 5), (8, 5), (8, 4))
"""Tokens a page, bits of V."""


def run(
    name: str, context: int, device: torch.device, bandwidth: float, twin_name: str | None, tune: bool
) -> Iterator[dict[str, Any]]:
    """Rows for packing and unpacking. bandwidth: bytes a second that are read. Raises WrongResult."""
    shape = SHAPES[name]
    layer = make_layer(shape, context, device)
    pack, unpack = twin("pack", device, twin_name), twin("unpack", device)
    cpu = layer.stats.to("cpu")
    for tokens, v_bits in FORMATS:
        fmt = PageFormat(tokens, shape.heads, shape.dim, 5, v_bits, min(64, shape.dim))
        what = f"{tokens} tokens a page, K 5 V {v_bits} bits"
        k, v = (pages_of(x, tokens) for x in (layer.k, layer.v))
        few = torch.arange(0, len(k), max(1, len(k) // SAMPLE), device=device)[:SAMPLE]
        packed = pack.pack_pages(k, v, layer.stats, fmt, "rope", 0.15)
        expected = plain_pack.pack_pages(k[few].cpu(), v[few].cpu(), cpu, fmt, "rope", 0.15)
        differ = int((packed[few].cpu() != expected).sum())
        if differ:
            raise WrongResult(f"pack {name}: {differ} of {expected.numel()} bytes differ from the reference's")
        size = layer.k.nbytes + layer.v.nbytes
        variants: list[tuple[int, ...]] = [()]
        if tune and name_of(pack) == "triton":
            variants += VARIANTS
        call = partial(pack.pack_pages, k, v, layer.stats, fmt, "rope", 0.15, None)
        times = {variant: graph_ms([partial(call, *variant)]) for variant in variants}
        ms = min(times.values())
        yield make_row(
            "pack", name, context, ms, what=what, twin=name_of(pack), bytes=size, error=0.0,
            bandwidth_fraction=round((size + packed.nbytes) / ms * 1e3 / bandwidth, 3),
            tera_bytes_in=round(size / ms / 1e9, 3),
            **({"variants": {str(x): round(t, 4) for x, t in times.items()}} if tune else {}),
        )  # fmt: skip
        ours = unpack.unpack_pages(packed[few], layer.stats, fmt, torch.float32)
        theirs = plain_unpack.unpack_pages(expected, cpu, fmt, torch.float32)
        error = max(relative(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
        check(f"unpack {name}", error, 1e-6)
        ms = graph_ms([partial(unpack.unpack_pages, packed, layer.stats, fmt, torch.bfloat16)])
        yield make_row(
            "unpack", name, context, ms, what=what, twin=name_of(unpack), bytes=size + packed.nbytes, error=error,
            bandwidth_fraction=round((size + packed.nbytes) / ms * 1e3 / bandwidth, 3),
        )  # fmt: skip
