"""Scoring the tokens of a prompt with TLIF, as a share of one layer's dense prefill attention over the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hisparse.bench.measure import check, event_ms, relative, wall_ms
from hisparse.bench.results import make_row
from hisparse.bench.shapes import SHAPES
from hisparse.tlif.network import Tlif
from hisparse.tlif.scorer import TlifScorer
from hisparse.tlif.statistics import network_inputs

TOLERANCE = 1e-3  # of importance, against float64 over the same rows
SAMPLE = 2048  # tokens that are checked
PREFIX = 128
TILES = (64, 128)
"""Tokens a program of the GPU's kernel."""


def run(name: str, context: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows for what serves on `device`, and on a GPU for the kernel's variants: a network of the size that `hisparse
    distill` makes, with random weights. Raises WrongResult."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    network = Tlif(shape.heads * shape.dim)
    scorer = TlifScorer(network, PREFIX)
    make = torch.Generator(device).manual_seed(1)
    values = torch.randn(context, shape.heads * shape.dim, generator=make, device=device)
    values += torch.randn(shape.heads * shape.dim, generator=make, device=device)
    values = values.to(torch.bfloat16)
    head = values[: min(SAMPLE, context)]
    exact = head.cpu().double()
    with torch.no_grad():
        want = network.double()(network_inputs(exact, exact[:0], PREFIX)).sigmoid()
    dense = None
    ways: list[tuple[str, Callable[[], Tensor]]] = [(device.type, lambda: scorer.score(values, None)[0])]
    if device.type == "cuda":
        q, k, v = (
            torch.randn(1, n, context, shape.dim, generator=make, device=device, dtype=torch.bfloat16)
            for n in (shape.q_heads, shape.heads, shape.heads)
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        dense = event_ms(lambda: attend(q, k, v, is_causal=True, enable_gqa=True), repeats=3)
        from hisparse.tlif.fused import FusedWeights

        weights = FusedWeights(*scorer._on(device))
        for tile in TILES if weights.holds_many(PREFIX) else TILES[:1]:
            ways.append((f"kernel, {tile} tokens a program", lambda n=tile: _kernel(weights, values, n)))  # type: ignore[misc]
    for what, score in ways:
        error = check(f"tlif {name}, {what}", relative(score()[: len(head)].cpu(), want), TOLERANCE)
        ms = wall_ms(score, device, 5)
        yield make_row(
            "tlif", name, context, ms, what=what, dense_ms=dense, bytes=values.nbytes, error=error,
            share=None if dense is None else round(ms / dense, 5), prefix_length=PREFIX,
            threads=torch.get_num_threads(),
        )  # fmt: skip


def _kernel(weights: Any, values: Tensor, tile: int) -> Tensor:
    importance: Tensor = weights.importance(values, values[:0], PREFIX, tile)
    return importance
