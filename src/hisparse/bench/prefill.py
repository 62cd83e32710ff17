"""Attention of a chunk over a packed past, most of it on the host, beside dense flash attention of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hisparse.bench.data import float64_attention, make_layer
from hisparse.bench.measure import check, event_ms
from hisparse.bench.past import Past
from hisparse.bench.results import make_row
from hisparse.bench.shapes import SHAPES
from hisparse.ops.attend import Packed, chunk_samples

TOLERANCE = 1.2e-2  # of the bfloat16 output, against float64
LOST = 0.03  # of the rows that the reference chooses, which float16 keys may change for others as good
CHECKED = 48  # queries that are checked


def error_of(past: Past, packed: list[Packed], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
    """Largest relative error over sampled queries and heads, against float64."""
    heads, (_, chunk, dim) = k.shape[0], q.shape
    slices = past.slices(packed)
    worst = 0.0
    for t in chunk_samples(chunk, CHECKED // 2, CHECKED // 2).tolist()[:: 1 if chunk <= CHECKED else 3]:
        here = [*slices, (k[:, : t + 1], v[:, : t + 1])]
        want = float64_attention(q[:, t].view(heads, -1, dim), here, past.scaling)
        found = out[:, t].view(heads, -1, dim).double()
        worst = max(worst, float(((found - want).norm(dim=-1) / want.norm(dim=-1)).max()))
    return worst


def dense_calls(past: Past, q: Tensor, k: Tensor, v: Tensor, context: int) -> dict[str, Callable[[], Any]]:
    """Dense attention of the same tokens: flash as PyTorch offers it, and the past by cuDNN joined as this op does."""
    from hisparse.ops.attend import triton as sliced

    keys, values = (torch.cat([a[:, :context], b], 1) for a, b in ((past.layer.k, k), (past.layer.v, v)))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    before = context // 1024 * 1024

    def cudnn() -> None:
        grouped = q.reshape(k.shape[0], -1, q.shape[2])
        sliced.partial_attention(grouped, keys[:, :before], values[:, :before], past.scaling, "cudnn")
        sliced.causal_attention(q, k, v, past.scaling, "flash")

    # The causal mask of this operation is aligned to the lower right, as torch.nn.attention.bias uses it.
    return {
        "flash": lambda: flash(q[None], keys[None], values[None], is_causal=True, scale=past.scaling),
        "cudnn": cudnn,
    }


def run(
    name: str, context: int, chunk: int, capacity: float, device: torch.device, pinned: float, budgets: list[int]
) -> Iterator[dict[str, Any]]:
    """Rows for `full` (rows adjacent in the pool, and scattered) and `recall` with multiples of the decode budget.

    pinned: bytes a second from pinned memory. Raises WrongResult.
    """
    from hisparse.ops.attend import triton as sliced

    shape = SHAPES[name]
    layer = make_layer(shape, context + chunk, device)
    q = torch.randn(shape.q_heads, chunk, shape.dim, device=device, dtype=torch.bfloat16)
    q[:, ::97] += layer.q[:, None]
    k, v = layer.k[:, context:], layer.v[:, context:]
    dense: dict[str, float] = {}
    for scattered in (False, True):
        past = Past(name, layer, context, capacity, scattered)
        if not dense:
            dense = {what: event_ms(call) for what, call in dense_calls(past, q, k, v, context).items()}
        shared = {"capacity": round(past.capacity, 2), "dense_ms": dense["flash"], "chunk": chunk}
        shared |= {"dense_cudnn_ms": round(dense["cudnn"], 4)}

        def attend(packed: list[Packed], library: Any = None, causal: Any = None, past: Past = past) -> Tensor:
            stats, scaling = layer.stats, past.scaling
            return sliced.attend(q, k, v, past.dense_k, past.dense_v, packed, stats, scaling, library, causal)

        where = "scattered rows" if scattered else "adjacent rows"
        for library, causal in ((None, None), (None, "cudnn"), ("flash", None)):
            packed = past.everything()
            found = attend(packed, library, causal)
            error = check(f"prefill {name}", error_of(past, packed, q, k, v, found), TOLERANCE)
            ms = event_ms(lambda p=packed, x=library, y=causal, f=attend: f(p, x, y))  # type: ignore[misc]
            used = library or sliced.choose_library(q, chunk)
            used += f", itself {causal}" if causal else ""
            yield make_row(
                "prefill-full", name, context, ms, what=f"chunk {chunk}, {where}, {used}", error=error,
                bytes=past.row_bytes, pinned_fraction=round(past.row_bytes / pinned / ms * 1e3, 3), **shared,
            )  # fmt: skip
        if scattered:
            yield from _recall(name, past, q, k, v, attend, budgets, shared)
        del past


def _recall(
    name: str, past: Past, q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor], budgets: list[int],
    shared: dict[str, Any],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    from hisparse.ops.attend import reference
    from hisparse.ops.attend import triton as sliced

    sample = q[:, chunk_samples(q.shape[1]).to(q.device)]
    context, chunk = past.context, q.shape[1]
    for times in budgets:
        count = min(past.rows, times * past.config.selection.budget(context) // past.row_format.tokens)
        sketches = (sample, past.codes, past.scales, past.layer.stats, past.scaling, count)
        choose = partial(sliced.select_for_chunk, *sketches)
        rows = choose()
        best = set(reference.select_for_chunk(*sketches).tolist())
        check(f"selection for a chunk {name}", 1 - len(best & set(rows.tolist())) / count, LOST)
        packed = past.chosen(rows)
        error = check(f"prefill recall {name}", error_of(past, packed, q, k, v, attend(packed)), TOLERANCE)
        ms = event_ms(lambda f=choose: attend(past.chosen(f())))  # type: ignore[misc]
        yield make_row(
            "prefill-recall", name, context, ms, error=error,
            what=f"chunk {chunk}, {times} x the decode budget",
            bytes=count * past.row_format.page_bytes, rows=count, select_ms=round(event_ms(choose), 4), **shared,
        )  # fmt: skip
