"""Two tensor-parallel ranks give the tokens of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine_tools import MIB, SMALL, engine, generate, random_prompts, runtime

# What a rank recalls depends on its own heads, and so may its tokens: everything is kept in five bits, or every row
# that was set aside comes back.
KEPT: dict[str, Any] = {"evict": "none", "tlif": {"prefix_length": 24}}
RECALLED: dict[str, Any] = {"selection": {"min_tokens": 1024}, "tlif": {"prefix_length": 24}}


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
@pytest.mark.parametrize("config", [KEPT, RECALLED], ids=["everything kept", "everything recalled"])
def test_two_ranks_give_the_tokens_of_one(
    config: dict[str, Any], small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    prompts = random_prompts(5, 100, 500)
    options: dict[str, Any] = {"model": str(small_model), "disable_log_stats": True, **SMALL}
    found = []
    for ranks in (1, 2):
        with engine(config, 32 * MIB, 64, tensor_parallel_size=ranks, **options) as llm:
            found.append(generate(llm, prompts, 80, detokenize=False))
            if ranks == 1:
                assert (runtime().statistics()["recalled_rows"] > 0) is (config is RECALLED)
    assert found[1] == found[0]
    assert len({tuple(tokens) for (tokens,) in found[0]}) == 3
    assert all(len(set(tokens)) > 10 for (tokens,) in found[0])
