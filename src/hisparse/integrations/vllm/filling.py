"""Random but valid content for a whole pool, for benchmarks of decoding."""

from __future__ import annotations

import torch

from hisparse.integrations.vllm.memory import LayerMemory


@torch.no_grad()
def fill(memory: LayerMemory) -> None:
    """Put one random block into every block of the pool, with a head of zeros."""
    layout, blocks = memory.layout, memory.dense
    generator = torch.Generator(device=blocks.device).manual_seed(0)
    shape = (1, layout.tokens, layout.heads, layout.head_dim)
    k, v = (torch.randn(shape, generator=generator, device=blocks.device).to(layout.dtype) for _ in range(2))
    if memory.stats is not None:
        k, v = k * memory.stats.k_scale + memory.stats.k_mean, v * memory.stats.v_scale + memory.stats.v_mean
        k, v = k.to(layout.dtype), v.to(layout.dtype)
    one = torch.ones(1, dtype=torch.int64, device=blocks.device)
    kept = (torch.arange(layout.tokens, device=blocks.device) < layout.other.pages * layout.page.tokens)[None]
    memory.pack(k, v, one, kept, False)
    flat = memory.blocks
    flat[1, : layout.head_pages * layout.page_stride] = 0
    flat[:] = flat[1].clone()
    if layout.host_rows:
        rows = memory.row_pages.view(len(flat), layout.host_rows, -1)
        rows[:] = rows[1].clone()
