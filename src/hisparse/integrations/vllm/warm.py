"""Running once, before the first request, what requests will need: kernels compile and graphs are captured."""

from __future__ import annotations

import torch

from hisparse.integrations.vllm.memory import LayerMemory
from hisparse.integrations.vllm.packing import TOGETHER, Full, Packer
from hisparse.integrations.vllm.step import Place, make_step

CHUNK = 1024
"""Tokens of the chunk that is attended to."""
PAST = 64
"""Blocks before it: enough that the recalling modes have to choose."""


def warm_packing(packer: Packer) -> None:
    """Pack block 0, which is nobody's, and capture it. What layers count stays as it was."""
    before = [(memory.faults.clone(), memory.error.clone()) for memory in packer.layers]
    device, tokens = packer.layers[0].blocks.device, packer.layers[0].layout.tokens
    for number, first in (*((n, False) for n in TOGETHER), (1, True)):
        nowhere = torch.zeros(number, tokens, dtype=torch.int64, device=device)
        packer.pack(Full(nowhere[:, 0], Place(nowhere, nowhere), first))
    for memory, (faults, error) in zip(packer.layers, before, strict=True):
        memory.faults.copy_(faults)
        memory.error.copy_(error)


def warm_prefill(memory: LayerMemory, q_heads: int) -> None:
    """Attend with a chunk to a past of what block 1 holds, whatever it is: nothing is written.

    q_heads: query heads of this rank.
    """
    layout, device = memory.layout, memory.blocks.device
    if len(memory.blocks) < 2:
        return
    pages = torch.ones(1, PAST + CHUNK // layout.tokens + 1, dtype=torch.int32, device=device)
    ring = torch.ones(1, layout.ring_blocks, dtype=torch.int32, device=device)
    past, new = (torch.tensor([n], device=device) for n in (PAST * layout.tokens, CHUNK))
    step = make_step(layout, memory.config.selection, pages, ring, past, new, PAST)
    q = torch.zeros(CHUNK, q_heads, layout.head_dim, dtype=layout.dtype, device=device)
    k, v = torch.zeros(2, CHUNK, layout.heads, layout.head_dim, dtype=layout.dtype, device=device)
    before = memory.recalled.clone(), memory.steps.clone()
    for length in (CHUNK, CHUNK // 2 + 1):
        memory.prefill(q[:length], k[:length], v[:length], step, 0, PAST * layout.tokens, int(step.packed))
    memory.recalled.copy_(before[0])
    memory.steps.copy_(before[1])
