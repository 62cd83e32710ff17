"""Block-level geometric sparsification: what is kept, in blocks that grow and thin out with distance."""

from hisparse.blgs.fixed import plan_fixed_blocks
from hisparse.blgs.plan import BlockPlan
from hisparse.blgs.planner import plan_blocks

__all__ = ["BlockPlan", "plan_blocks", "plan_fixed_blocks"]
