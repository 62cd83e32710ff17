"""A program that pretends to have a GPU: which kernels are compiled ahead, and which does a layer then launch?

    python fake_gpu.py CONFIG    # without TRITON_INTERPRET; CONFIG: JSON with shape, dtype, context and settings

Nothing is compiled or launched: kernels are noted with what they are specialised for. Prints JSON: `ahead`, how many
were compiled ahead; `missed`, what a layer launched beside them; `error`, what stopped compiling ahead.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

PHASE = ["ahead"]
SEEN: dict[str, str] = {}


def note(key: object) -> None:
    SEEN.setdefault(str(key), PHASE[0])


def pretend() -> None:
    """An H200, to torch and to Triton."""
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.device = nullcontext  # type: ignore[assignment, misc]
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
        )
    )

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binder = self.device_caches[0][-1]
        _, specialisation, found = binder(*args, **options, debug=False, instrumentation_mode="")
        note((self.fn.__module__, self.fn.__qualname__, specialisation, found))

    JITFunction.run = run

    # What no kernel has written must not be read as an index.
    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like
    torch.empty = lambda *size, **kinds: _zero(empty(*size, **kinds))
    torch.Tensor.new_empty = lambda self, *size, **kinds: _zero(new_empty(self, *size, **kinds))  # type: ignore[assignment]
    torch.empty_like = lambda x, **kinds: _zero(empty_like(x, **kinds))


def _zero(x: Any) -> Any:
    return x if x.is_meta else x.zero_()


def main(given: dict[str, Any]) -> dict[str, Any]:
    pretend()
    from hisparse.ops import _cuda, _dispatch

    class Kernel:
        def __init__(self, *key: object) -> None:
            note(key)

        def prefer_shared(self) -> Kernel:
            return self

        def resident(self, *_: int) -> int:
            return 1

        def __call__(self, *_: object, **__: object) -> None:
            pass

    _cuda.load_kernel = lambda path, function, defines=None, registers=None, device=None: Kernel(  # type: ignore[assignment]
        path, sorted((defines or {}).items()), registers
    )
    serve = _dispatch.backend_for
    gpu = torch.device("cuda", 0)
    _dispatch.backend_for = lambda op, device: serve(op, device if device.type == "meta" else gpu)
    from hisparse.config import HiSparseConfig
    from hisparse.integrations.vllm import warm
    from hisparse.integrations.vllm.hot import HOT_SHARE, Claims, HotRows, hot_size
    from hisparse.integrations.vllm.layout import choose_layout
    from hisparse.integrations.vllm.memory import LayerMemory
    from hisparse.integrations.vllm.packing import Packing
    from hisparse.integrations.vllm.step import make_step, row_budget
    from hisparse.integrations.vllm.step_kernels import fill_step
    from hisparse.ops.attend.kernels import gather
    from hisparse.ops.fetch import gather_rows
    from hisparse.vtq.stats import ChannelStats

    heads, q_heads, dim, context = (given[name] for name in ("heads", "q_heads", "dim", "context"))
    dtype, requests, tokens = getattr(torch, given["dtype"]), 4, 256
    config = HiSparseConfig(**given["config"])
    layout = choose_layout(config, heads, dim, dtype, context, tokens, HOT_SHARE)
    budget = row_budget(layout, config.selection, context)
    hot = hot_size(config.selection, layout, budget, requests, given.get("memory", 2_000_000_000))
    order = torch.arange(dim)
    plan = warm.Plan(layout, config, order, hot, requests, [1, 2, 4], q_heads, context)
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it makes the model
    background = warm.compile_ahead(plan)
    assert background is not None
    background.join()
    torch.set_default_dtype(torch.float32)

    PHASE[0] = "launched"
    device, blocks, width = torch.device("cpu"), 30, -(-context // tokens)
    own = None
    if hot.slots:
        claims = Claims(blocks * layout.rows_per_block, device)
        own = HotRows(hot, layout, int(config.selection.hot_factor * budget), requests, claims, device)
    memory = torch.zeros(blocks, 1, 1, layout.block_bytes, dtype=torch.uint8)
    stats = ChannelStats.identity(heads, dim, order)
    layer = LayerMemory(layout, config, memory, stats, order, dim**-0.5, budget, True, own)
    for number in (1, 3):
        kept = torch.zeros(number, tokens, dtype=torch.bool)
        for first in (True, False):
            k, v = torch.zeros(2, number * tokens, heads, dim, dtype=dtype)
            layer.pack_tokens(k, v, Packing.of(layout, torch.arange(number), kept, first))
    for batch in (1, 2, 4):
        pages = torch.ones(batch, width + 7, dtype=torch.int32)
        ring = torch.ones(batch, width + 9, dtype=torch.int32)
        past, one = torch.full((batch,), 2500), torch.ones(batch, dtype=torch.int64)
        step = make_step(layout, config.selection, pages, ring, past, one, width)
        starts = torch.arange(batch + 1, dtype=torch.int32)
        most = hot.slots or None
        fill_step(layout, config.selection, pages, ring, (past + 1).int(), starts, step, width, most, budget)
        q = torch.zeros(batch, q_heads, dim, dtype=dtype)
        k, v = torch.zeros(2, batch, heads, dim, dtype=dtype)
        layer.decode(q, k, v, step, torch.empty_like(q))
    if layer.source is not None:  # a chunk's rows, from anywhere in their list
        ids = torch.zeros(100, dtype=torch.int64)
        for start in (0, 1, 16):
            some = ids[start:]
            gather(layer.source, some, torch.zeros(len(some), layout.row.page_bytes, dtype=torch.uint8))
            gather_rows(layer.source, some.int()[None])
    missed = [key for key, phase in SEEN.items() if phase != "ahead"]
    return {"ahead": len(SEEN) - len(missed), "missed": missed, "error": repr(background.error)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
