"""Packing full blocks: which tokens go where, and the same for all layers in one CUDA graph.

Layers differ in their values alone: what is kept, and where it goes, is worked out once. What steps of single tokens
fill is packed layer after layer by a few kernels each, whose launches would take the host tens of times longer than the
device needs: so they are captured, once for every number of blocks that are packed together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hisparse.errors import HiSparseError
from hisparse.integrations.vllm.layout import BlockLayout
from hisparse.integrations.vllm.step import Place, ring_place

if TYPE_CHECKING:
    from hisparse.integrations.vllm.memory import LayerMemory

logger = logging.getLogger("vllm.hisparse")

TOGETHER = (8, 4, 2, 1)
"""Numbers of blocks that a graph packs, greatest first."""


@dataclass(frozen=True)
class Full:
    """Blocks that a step of single tokens fills: packed before the next step writes anything.

    blocks: int64 [m]; place: [m, W], where their tokens lie densely. first: they begin their sequences.
    """

    blocks: Tensor
    place: Place
    first: bool

    def __len__(self) -> int:
        return len(self.blocks)

    def part(self, start: int, number: int) -> Full:
        here = slice(start, start + number)
        return Full(self.blocks[here], self.place[here], self.first)


@dataclass(frozen=True)
class Places:
    """Of a chunk: where its newest tokens go, and where those lie that came before it in its first block, if any."""

    new: Place
    old: Place | None

    @classmethod
    def of(cls, layout: BlockLayout, ring: Tensor, lead: Tensor, past: int, after: int) -> Places:
        """Of tokens past .. after - 1; ring [1, n], lead [1]: see `ring_place`."""

        def place(first: int, last: int) -> Place:
            return ring_place(layout, ring, lead, torch.arange(first, last, device=ring.device)[None])[0]

        begin = past // layout.tokens * layout.tokens
        new = place(after - min(after - past, layout.ring_slots), after)
        return cls(new, place(begin, past) if begin < past else None)


@dataclass(frozen=True)
class Packing:
    """Where the tokens of m full blocks of W tokens go, in every layer.

    blocks: int64 [m]. page_tokens int64 [n, P]: which of the m * W tokens each kept page holds; pages int64 [n], its
    record. row_tokens int64 [r, R], rows int64 [r] the same of what is set aside; lines int64 [r]: where a row's packed
    values lie, see `BlockLayout.host_id` (records where rows stay on the device).
    """

    blocks: Tensor
    first: bool
    page_tokens: Tensor
    pages: Tensor
    row_tokens: Tensor
    rows: Tensor
    lines: Tensor

    @classmethod
    def of(cls, layout: BlockLayout, blocks: Tensor, kept: Tensor, first: bool) -> Packing:
        """blocks: int64 [m]; kept: bool [m, W], as many in each block as the layout keeps. first: see `Full`."""
        counts, device = layout.first if first else layout.other, blocks.device
        head = layout.head if first else 0
        kept = kept[:, head:]
        index = kept.to(torch.uint8).sort(dim=1, stable=True).indices  # set aside first, each part in order
        index = index + torch.arange(head, head + len(blocks) * layout.tokens, layout.tokens, device=device)[:, None]
        split = kept.shape[1] - counts.pages * layout.page.tokens
        page = torch.arange(counts.pages, device=device) + (layout.head_pages if first else 0)
        number = counts.rows if layout.has_rows else 0
        rows = (blocks[:, None] + 1) * layout.rows_per_block - 1 - torch.arange(number, device=device)
        rows = rows.flatten()
        return cls(
            blocks,
            first,
            index[:, split:].reshape(-1, layout.page.tokens),
            (blocks[:, None] * layout.pages_per_block + page).flatten(),
            index[:, : number * layout.row.tokens].reshape(-1, layout.row.tokens),
            rows,
            layout.host_id(rows) if layout.host_rows else rows,
        )


Decide = Callable[[Tensor, bool], Tensor]
"""Which tokens of full blocks are kept, bool [m, W], from layer 0's values [m, W, H, D]; True: they are first ones."""


def pack_layers(layers: list[LayerMemory], full: Full, decide: Decide, check: bool = True) -> Packing:
    """Pack `full` in all layers, from where its tokens lie densely."""
    packing: Packing | None = None
    for memory in layers:
        k, v = memory.read(full.place)
        if packing is None:
            packing = Packing.of(memory.layout, full.blocks, decide(v, full.first), full.first)
        memory.pack_tokens(k.flatten(0, 1), v.flatten(0, 1), packing, check=check)
    assert packing is not None  # there are layers
    return packing


class _Graph:
    """`pack_layers` of a number of blocks, captured; its inputs lie at fixed addresses."""

    def __init__(self, layers: list[LayerMemory], full: Full, decide: Decide, pool: Any) -> None:
        self.full = Full(
            full.blocks.clone(), Place(full.place.block.clone(), full.place.slot.clone()), full.first
        )  # fmt: skip
        self.graph = torch.cuda.CUDAGraph()
        # Other threads of the engine may copy and allocate meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.packing = pack_layers(layers, self.full, decide, check=False)

    def replay(self, full: Full) -> None:
        self.full.blocks.copy_(full.blocks)
        self.full.place.block.copy_(full.place.block)
        self.full.place.slot.copy_(full.place.slot)
        self.graph.replay()


class Packer:
    """Packs what single tokens fill, in all layers of one engine.

    decide: see `Decide`; graphs: capture, on a GPU. `decide` and the layers' kernels must then not wait for the device.
    """

    def __init__(self, layers: list[LayerMemory], decide: Decide, graphs: bool) -> None:
        self.layers, self.decide, self.graphs = layers, decide, graphs
        self._captured: dict[tuple[int, bool], _Graph] = {}
        self._pool: Any = None
        self.turn = 0  # of the layer that looks at one of its pages next

    def pack(self, full: Full) -> None:
        """Pack all of `full`. On a GPU as few graphs as add up to it; the first time, eagerly."""
        done = 0
        while done < len(full):
            if not self.graphs:
                pack_layers(self.layers, full.part(done, len(full) - done), self.decide)
                return
            number = next(n for n in TOGETHER if n <= len(full) - done)
            part = full.part(done, number)
            known = self._captured.get((number, full.first))
            if known is None:
                # What is captured must have run before: kernels are compiled and tables made when first used.
                pack_layers(self.layers, part, self.decide)
                self._capture(part)
            else:
                known.replay(part)
                self._check(known)
            done += number

    def _capture(self, full: Full) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        try:
            self._captured[len(full), full.first] = _Graph(self.layers, full, self.decide, self._pool)
        except (RuntimeError, HiSparseError) as error:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own
            self.graphs = False
            logger.warning(
                "HiSparse: packing cannot be captured as a CUDA graph (%s): a step after a request has filled a block "
                "will wait for some hundred launches",
                error,
            )

    def _check(self, graph: _Graph) -> None:
        """One layer after the other looks at one of its pages, now and then."""
        memory = self.layers[self.turn % len(self.layers)]
        if memory.counts(len(graph.packing.pages)):
            self.turn += 1
            keys, _ = memory.read(graph.full.place)
            memory.check(graph.packing, keys.flatten(0, 1))
