"""What a layer holds of a long text at a KV capacity, built as the cache would."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.bench.data import CHUNK, Layer, pages_of
from hisparse.bench.shapes import SHAPES
from hisparse.cache.geometry import Geometry
from hisparse.config import BudgetConfig, HiSparseConfig
from hisparse.errors import InputError
from hisparse.ops.attend import Packed
from hisparse.ops.fetch import HostRows
from hisparse.ops.fetch.pinned import pinned_rows
from hisparse.ops.sketch import build_sketch
from hisparse.ops.unpack import unpack_pages

SLOTS = 148
"""Dense: sinks, tail, and tokens that wait for their page or row."""


class Past:
    """Dense slots, kept pages on the device, rows in pinned host memory, their sketches.

    capacity: dense bfloat16 bytes / device bytes, hot buffer included; what it leaves is spent on kept tokens, as
    `Geometry.keep_limit` does. scattered: rows lie in random places of the pool, else in the order of their positions.
    Which tokens are kept makes no difference to time: they are the first ones. `codes` [n, ..], `scales` [n, ..] and
    `ids` are in the order of positions, of the pool if not scattered.
    """

    def __init__(
        self,
        name: str,
        layer: Layer,
        context: int,
        capacity: float,
        scattered: bool,
        bits: int = 2,
        page_size: int | None = None,
    ) -> None:
        shape, device = SHAPES[name], layer.k.device
        self._arguments = (name, layer, context, capacity, scattered, bits, page_size)
        config = HiSparseConfig(
            budget=BudgetConfig(capacity=capacity, min_keep=0.0),
            selection={"sketch_bits": bits},
            vtq={"page_size": page_size},
        ).on(device.type)
        geometry = Geometry(shape.layers, shape.heads, shape.dim, torch.bfloat16, config, batched=True)
        self.name, self.layer, self.context, self.config = name, layer, context, config
        self.scaling, self.bits = shape.dim**-0.5, bits
        self.dense_k, self.dense_v = layer.k[:, :SLOTS], layer.v[:, :SLOTS]
        first = -(-SLOTS // 64) * 64
        packed = (context - first) // 64 * 64
        overhead = geometry.slots * geometry.slot_bytes
        self.hot_rows = geometry.hot_rows(context, packed, overhead)
        overhead += self.hot_rows * geometry.hot_row_bytes
        size = max(config.vtq.page_tokens(), config.selection.row_size)
        kept = geometry.keep_limit(context, packed, overhead) // size * size
        if kept < size:
            raise InputError(f"capacity {capacity} leaves no room for kept tokens at {context} tokens; lower it")
        self.kept_format, self.row_format = geometry.kept_format, geometry.row_format
        tokens = self.row_format.tokens
        self.kept_pages, self.rows = layer.pack(self.kept_format, first, kept), (packed - kept) // tokens
        pages = layer.pack(self.row_format, first + kept, self.rows * tokens)
        make = torch.Generator().manual_seed(2)
        places = torch.randperm(self.rows, generator=make) if scattered else torch.arange(self.rows)
        pool = pinned_rows(*pages.shape) if device.type == "cuda" else torch.empty_like(pages)
        pool.copy_(pages[places.argsort().to(device)])
        self.source = HostRows.of([pool], device)
        self.row_bytes = pool.nbytes
        self.ids = places.to(device) if scattered else places
        keys = pages_of(layer.k[:, first + kept : first + kept + self.rows * tokens], tokens)
        sketches = [build_sketch(some, layer.stats, bits) for some in torch.split(keys, CHUNK // tokens)]
        self.codes, self.scales = (torch.cat(part) for part in zip(*sketches, strict=True))
        self.kept = Packed(self.kept_pages, self.kept_format)
        device_bytes: float = self.kept_pages.nbytes + self.codes.nbytes + self.scales.nbytes + 2 * self.dense_k.nbytes
        device_bytes += self.hot_rows * (self.row_format.page_bytes + 8)
        device_bytes += 4 * self.rows if self.hot_rows else 0  # where in the hot buffer each row is
        # Tables and positions of kept tokens are shared by all layers.
        device_bytes += 4 * (self.rows + len(self.kept_pages) + kept) / shape.layers
        self.device_bytes = int(device_bytes)
        self.capacity = context * shape.token_bytes / device_bytes
        self.budget = config.selection.budget(context) // tokens

    def again(self) -> Past:
        """The same once more, in memory of its own."""
        return Past(*self._arguments)

    def everything(self) -> list[Packed]:
        """Kept pages and all rows."""
        return [self.kept, Packed(self.source, self.row_format, self.ids)]

    def chosen(self, rows: Tensor) -> list[Packed]:
        """Kept pages and the rows of these numbers, in order of position."""
        return [self.kept, Packed(self.source, self.row_format, self.ids.to(rows.device)[rows])]

    def slices(self, packed: list[Packed]) -> list[tuple[Tensor, Tensor]]:
        """K and V float32 [H, n, D] of what `packed` and the dense slots hold, by the reference's unpacking."""
        parts = [(self.dense_k.float(), self.dense_v.float())]
        for part in packed:
            pages = part.read(self.dense_k.device)
            for some in torch.split(pages, CHUNK // part.fmt.tokens):
                k, v = unpack_pages(some, self.layer.stats, part.fmt, torch.float32)
                parts.append((k.permute(2, 0, 1, 3).flatten(1, 2), v.permute(2, 0, 1, 3).flatten(1, 2)))
        return parts
