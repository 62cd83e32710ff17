"""What an engine on a CPU says of the kernels that one on a GPU would compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from engine_tools import SMALL, engine, runtime, small_llama


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU an engine compiles")
def test_an_engine_on_a_cpu_compiles_nothing_and_knows_its_plan(tmp_path: Path) -> None:
    from hisparse.integrations.vllm.warm import plan_of

    with engine({}, model=str(small_llama(tmp_path)), max_num_seqs=6, **SMALL):
        own = runtime()
        assert own._compiling is None
        plan = plan_of(own)
        assert plan.layout is own.layout
        assert (plan.requests, plan.q_heads, plan.context, {1, 6} - set(plan.batches)) == (6, 4, 1024, set())
        assert sorted(plan.order.tolist()) == list(range(32))
