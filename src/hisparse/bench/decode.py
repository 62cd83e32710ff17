"""Decode attention over packed pages on the device, beside dense attention of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hisparse.bench.data import CHUNK, Layer, float64_attention, make_layer
from hisparse.bench.measure import L2_BYTES, check, graph_ms
from hisparse.bench.results import make_row
from hisparse.bench.shapes import SHAPES
from hisparse.bench.twins import name_of, twin
from hisparse.errors import InputError
from hisparse.ops.decode import Pages
from hisparse.ops.unpack import unpack_pages
from hisparse.vtq.format import PageFormat

SLOTS = 148  # dense: sinks, tail and tokens that wait for their page
TOLERANCE = 8e-3  # of the bfloat16 output, against float64


class Case:
    """A layer, its pages in random places of a pool, and as many ranges of `context` tokens as L2 cannot hold."""

    def __init__(self, layer: Layer, fmt: PageFormat, context: int) -> None:
        device = layer.k.device
        self.layer, self.fmt, self.context, self.scaling = layer, fmt, context, fmt.head_dim**-0.5
        pages = layer.pack(fmt)
        make = torch.Generator(device).manual_seed(3)
        self.table = torch.randperm(len(pages), generator=make, device=device).int()
        self.pool = torch.empty_like(pages)
        self.pool[self.table.long()] = pages
        self.q = layer.q[None]
        self.dense = tuple(x[None, :, :SLOTS].contiguous() for x in (layer.k, layer.v))
        self.length = torch.tensor([SLOTS], dtype=torch.int32, device=device)

    def pages(self, first: int) -> Pages:
        """Those of `context` tokens from token `first` on."""
        size = self.fmt.tokens
        table = self.table[None, first // size : (first + self.context) // size].contiguous()
        count = torch.tensor([table.shape[1]], dtype=torch.int32, device=table.device)
        return Pages(self.pool, table, count, self.fmt)

    def attend(self, module: ModuleType, pages: Pages, *tuning: Any) -> Tensor:
        """[Hq, D]"""
        result = module.decode_attention(
            self.q,
            *self.dense,
            self.length,
            pages,
            None,
            self.layer.stats,
            self.scaling,
            None,
            None,
            False,
            "rope",
            *tuning,
        )
        return result.out[0]  # type: ignore[no-any-return]

    def exact(self, pages: Pages) -> Tensor:
        """The same in float64, from the reference's unpacking."""
        slices = [(self.dense[0][0], self.dense[1][0])]
        for ids in torch.split(pages.table[0].long(), CHUNK // self.fmt.tokens):
            k, v = unpack_pages(self.pool[ids], self.layer.stats, self.fmt, torch.float32)
            slices.append((k.permute(2, 0, 1, 3).flatten(1, 2), v.permute(2, 0, 1, 3).flatten(1, 2)))
        q = self.layer.q.view(self.fmt.heads, -1, self.fmt.head_dim)
        return float64_attention(q, slices, self.scaling).flatten(0, 1)

    def dense_ms(self, ranges: list[int]) -> float:
        k, v = self.layer.k, self.layer.v
        calls = [
            partial(
                scaled_dot_product_attention, self.q[:, :, None], k[None, :, first : first + self.context],
                v[None, :, first : first + self.context], scale=self.scaling, enable_gqa=True,
            )
            for first in ranges
        ]  # fmt: skip
        return graph_ms(calls)


def run(
    name: str,
    contexts: list[int],
    page_size: int,
    group: int,
    device: torch.device,
    bandwidth: float,
    twin_name: str | None,
    tunings: list[str],
) -> Iterator[dict[str, Any]]:
    """A row for each context and tuning. bandwidth: bytes a second that are read. Raises WrongResult."""
    shape = SHAPES[name]
    module = twin("decode", device, twin_name)
    fmt = PageFormat(page_size, shape.heads, shape.dim, 5, 5, min(group, shape.dim))
    # A short context's own data fit the cache: several stretches of a longer one take turns.
    least = max(*contexts, L2_BYTES // fmt.page_bytes * page_size // 65536 * 65536) if contexts else 0
    layer = make_layer(shape, least, device)
    for context in contexts:
        if context % max(page_size, 64):
            raise InputError(f"context {context} is not a multiple of 64 and of the page size {page_size}; round it")
        case = Case(layer, fmt, context)
        ranges = [i * context for i in range(max(1, min(8, layer.context // context)))]
        pages = [case.pages(first) for first in ranges]
        dense = case.dense_ms(ranges)
        want = case.exact(pages[0])
        for tuning in tunings or [""]:
            extra = _tuning(module, tuning)
            found = case.attend(module, pages[0], *extra).double()
            error = float(((found - want).norm(dim=-1) / want.norm(dim=-1)).max())
            check(f"decode {name} {context} {tuning}", error, TOLERANCE)
            ms = graph_ms([partial(case.attend, module, p, *extra) for p in pages])
            size = context // page_size * fmt.page_bytes + sum(x.nbytes for x in case.dense)
            what = f"{page_size} tokens a page, groups of {fmt.group}"
            yield make_row(
                "decode", name, context, ms, what=what + (f", {tuning}" if tuning else ""), twin=name_of(module),
                capacity=round(context * shape.token_bytes / size, 3), dense_ms=dense, bytes=size, error=error,
                bandwidth_fraction=round(size / ms * 1e3 / bandwidth, 4),
            )  # fmt: skip


def _tuning(module: ModuleType, text: str) -> tuple[Any, ...]:
    if not text:
        return ()
    if not hasattr(module, "Tuning"):
        raise InputError(f"the {name_of(module)} kernel has no --tune; leave it out")
    try:
        return (module.Tuning(*map(int, text.split(","))),)
    except (TypeError, ValueError):
        names = ", ".join(field.name for field in fields(module.Tuning))
        raise InputError(f"--tune {text!r}: give {names} of the {name_of(module)} kernel in whole numbers") from None
