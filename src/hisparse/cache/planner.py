"""Deciding, once per token and for all layers, what is kept: importance, block plan, byte target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse.blgs import BlockPlan, plan_blocks
from hisparse.cache.geometry import SINKS, Geometry, spare_entries
from hisparse.cache.sequence import Commit, Sequence
from hisparse.tlif import Scorer


@dataclass
class Planner:
    """The plan of one sequence, extended chunk by chunk."""

    geometry: Geometry
    scorer: Scorer
    sequence: Sequence
    state: Any = None
    plans: list[tuple[int, BlockPlan, Tensor]] = field(default_factory=list)  # first position, plan, importance
    anchors: int = 0
    blocks: int = 0
    keep_plans: bool = False

    def score(self, values: Tensor) -> Tensor:
        """Importance float32 [T] of the next tokens, on their device.

        values: [T, F], the chunk's value rows of layer 0 (a linear image of its token embeddings).
        """
        importance, self.state = self.scorer.score(values, self.state)
        return importance.detach().float()

    def extend(self, importance: npt.NDArray[np.float32]) -> Commit:
        """Take in tokens of this importance, and decide about those that leave the tail."""
        return self.sequence.extend(importance, self._decide)

    def _decide(self, importance: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        config, sequence, geometry = self.geometry.config, self.sequence, self.geometry
        graduated = sequence.graduated + len(importance)
        tensor = torch.from_numpy(importance)
        threshold = config.tlif.threshold(sequence.length)
        limit: int | None = None
        if config.evict != "none":
            limit = (
                geometry.keep_limit(sequence.length, graduated, self.overhead_bytes(graduated)) - sequence.kept_total
            )
            limit = max(0, min(limit, len(importance)))
        plan = plan_blocks(tensor, threshold, config.blgs, geometry.heads * geometry.head_dim, limit)
        self.anchors += int(plan.anchor.sum())
        self.blocks += plan.n_blocks
        if self.keep_plans:
            self.plans.append((SINKS + sequence.graduated, plan, tensor))
        if config.evict == "none":
            return np.ones(len(importance), bool)
        return plan.keep.numpy()

    def overhead_bytes(self, graduated: int) -> int:
        """Device bytes that are neither kept tokens nor sketches: spare pool rows and the hot buffer included."""
        fixed = self._fixed_bytes(graduated)
        geometry = self.geometry
        return fixed + geometry.hot_rows(self.sequence.length, graduated, fixed) * geometry.hot_row_bytes

    @property
    def hot_rows(self) -> int:
        """Slots that the hot buffers should have for this sequence."""
        graduated = self.sequence.graduated
        return self.geometry.hot_rows(self.sequence.length, graduated, self._fixed_bytes(graduated))

    def _fixed_bytes(self, graduated: int) -> int:
        geometry, sequence = self.geometry, self.sequence
        spare_rows = sequence.row_ids.slack(graduated // sequence.row_size) * sequence.row_size
        spare_pages = sequence.page_ids.slack(sequence.kept_total // sequence.page_size) * sequence.page_size
        tables = spare_entries(graduated // sequence.row_size) + spare_entries(
            sequence.kept_total // sequence.page_size
        )
        return int(
            geometry.slots * geometry.slot_bytes
            + self.state_bytes
            + 4 * tables * geometry.batched
            + spare_rows * geometry.aside_token_bytes
            + spare_pages * geometry.kept_token_bytes
        )

    @property
    def state_bytes(self) -> int:
        return int(self.state.nbytes) if self.state is not None else 0
