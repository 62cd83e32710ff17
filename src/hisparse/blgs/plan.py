"""The block plan of one sequence: a partition of its positions, and which tokens of every block are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

NO_MODE = -1
"""Distance of a block in a plan that has no mode at all."""


@dataclass(frozen=True)
class BlockPlan:
    """A partition of positions ``0..T-1`` into `B` blocks, shared by all layers; all tensors lie on one device.

    A block covers `tokens` consecutive positions from `start` on and every channel of a layer's K or V; along the
    channels it is cut into tiles of `channel_width` (the last tile may be narrower).
    """

    keep: Tensor
    """bool [T]: the token stays on the device."""
    anchor: Tensor
    """bool [T]: the token passed the threshold (and the limit); a subset of `keep`."""
    modes: Tensor
    """int64 [M]: positions of the density's modes, ascending; each is an anchor."""
    start: Tensor
    """int64 [B]: first position, ascending."""
    tokens: Tensor
    """int64 [B]: positions covered; only the last block may be cut short by the end of the sequence."""
    channel_width: Tensor
    """int64 [B]: channels a tile covers."""
    level: Tensor
    """int64 [B]: uncut length = ``min_block_size * 2 ** level``."""
    kept: Tensor
    """int64 [B]: tokens of the block that are kept."""
    distance: Tensor
    """int64 [B]: positions between the block and the nearest mode; 0 if it holds one, NO_MODE if there is none."""
    channels: int
    """Channels of one layer's K or V."""
    min_block_size: int
    """Length of a level-0 block."""
    demoted: int
    """Anchors that passed the threshold but not the limit."""

    @property
    def length(self) -> int:
        """Positions covered, T."""
        return self.keep.shape[0]

    @property
    def n_blocks(self) -> int:
        """Blocks of positions, B."""
        return self.start.shape[0]

    @property
    def n_tiles(self) -> int:
        """Position x channel tiles of one K or V tensor: the sum over blocks of ceil(channels / channel_width)."""
        return int(torch.div(self.channels + self.channel_width - 1, self.channel_width, rounding_mode="floor").sum())

    @property
    def n_kept(self) -> int:
        """Tokens kept."""
        return int(self.kept.sum())

    @property
    def n_anchors(self) -> int:
        """Tokens that are anchors."""
        return int(self.anchor.sum())

    @property
    def density(self) -> float:
        """Tokens kept / tokens covered; 0 for an empty plan."""
        return self.n_kept / self.length if self.length else 0.0

    @property
    def block_density(self) -> Tensor:
        """float32 [B]: tokens kept / tokens covered, per block."""
        return self.kept.float() / self.tokens.float()

    def to(self, device: torch.device | str) -> BlockPlan:
        """The same plan with its tensors on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def check_integrity(self, echo: Callable[[str], None] = print) -> None:
        """Print each invariant with its numbers; raise RuntimeError (a defect of ours) at the first that fails."""
        cpu = self.to("cpu")
        start, tokens, kept = cpu.start, cpu.tokens, cpu.kept
        end = start + tokens
        size = self.min_block_size << cpu.level

        def line(good: bool, text: str) -> None:
            echo(f"{'ok  ' if good else 'FAIL'} {text}")
            if not good:
                raise RuntimeError(f"block plan of {self.length} tokens is broken: {text}")

        first = int(start[0]) if self.n_blocks else 0
        last = int(end[-1]) if self.n_blocks else 0
        gaps = int((start[1:] != end[:-1]).sum())
        line(
            first == 0 and last == self.length and gaps == 0 and int(tokens.sum()) == self.length,
            f"partition: {self.n_blocks} blocks from {first} to {last} of {self.length}, "
            f"sum of tokens {int(tokens.sum())}, gaps or overlaps {gaps}",
        )
        misaligned = int((start % size != 0).sum())
        wrong_size = int((tokens != size)[:-1].sum()) + int((tokens > size).sum()) + int((tokens < 1).sum())
        line(misaligned == 0 and wrong_size == 0, f"dyadic: misaligned {misaligned}, of wrong length {wrong_size}")
        widths = int(((cpu.channel_width < 1) | (cpu.channel_width > self.channels)).sum())
        line(widths == 0, f"channels: {self.channels} in {self.n_tiles} tiles, widths out of range {widths}")
        running = torch.cat([torch.zeros(1, dtype=torch.int64), cpu.keep.long().cumsum(0)])
        counted = running[end] - running[start]
        differing = int((counted != kept).sum())
        line(
            differing == 0 and int(kept.sum()) == int(cpu.keep.sum()),
            f"kept: mask {int(cpu.keep.sum())} = sum over blocks {int(kept.sum())}, blocks that differ {differing}",
        )
        lost = int((cpu.anchor & ~cpu.keep).sum())
        line(
            lost == 0, f"anchors: {int(cpu.anchor.sum())} anchors, not kept {lost}, demoted by the limit {self.demoted}"
        )
        stray = int((~cpu.anchor[cpu.modes]).sum())
        unordered = int((cpu.modes[1:] <= cpu.modes[:-1]).sum())
        line(stray == 0 and unordered == 0, f"modes: {len(cpu.modes)}, not an anchor {stray}, out of order {unordered}")

    def to_json(self) -> str:
        """JSON text: the totals, the modes, and per block start, tokens, channel_width, level, kept and distance."""
        names = ("start", "tokens", "channel_width", "level", "kept", "distance")
        return json.dumps(
            {
                "tokens": self.length,
                "channels": self.channels,
                "kept": self.n_kept,
                "anchors": self.n_anchors,
                "demoted": self.demoted,
                "density": self.density,
                "blocks": self.n_blocks,
                "tiles": self.n_tiles,
                "modes": self.modes.tolist(),
                "block": {name: getattr(self, name).tolist() for name in names},
            }
        )
