"""Planning the blocks of a million tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from hisparse.bench.measure import WrongResult, wall_ms
from hisparse.bench.results import make_row
from hisparse.bench.shapes import SHAPES
from hisparse.blgs import plan_blocks, synthetic_importance
from hisparse.config import HiSparseConfig


def run(name: str, context: int, devices: list[torch.device]) -> Iterator[dict[str, Any]]:
    """A row for each device, with and without a limit of a tenth of the tokens. Every device must give the same plan as
    the CPU, or WrongResult is raised."""
    shape, config = SHAPES[name], HiSparseConfig()
    importance = synthetic_importance(context)
    threshold = config.tlif.threshold(context)
    for limit in (None, context // 10, context // 100):
        what = "no limit" if limit is None else f"at most {limit} kept"
        plans = []
        for device in devices:
            p = importance.to(device)
            call = partial(plan_blocks, p, threshold, config.blgs, shape.heads * shape.dim, limit)
            plan = call().to("cpu")
            plans.append(plan)
            same = all(
                torch.equal(getattr(plan, field), getattr(plans[0], field))
                for field in ("keep", "anchor", "modes", "start", "tokens", "channel_width", "kept", "distance")
            )
            if not same:
                raise WrongResult(f"plan of {context} tokens, {what}: {device} differs from {devices[0]}")
            yield make_row(
                "plan", name, context, wall_ms(call, device), what=f"{what}, {device.type}", error=0.0,
                blocks=plan.n_blocks, kept=plan.n_kept, threads=torch.get_num_threads(),
            )  # fmt: skip
