"""Block-level geometric sparsification: what is kept, in blocks that grow and thin out with distance."""

from hisparse.blgs.draw import draw_plan
from hisparse.blgs.fixed import plan_fixed_blocks
from hisparse.blgs.plan import BlockPlan
from hisparse.blgs.planner import plan_blocks
from hisparse.blgs.synthetic import synthetic_importance

__all__ = ["BlockPlan", "draw_plan", "plan_blocks", "plan_fixed_blocks", "synthetic_importance"]
