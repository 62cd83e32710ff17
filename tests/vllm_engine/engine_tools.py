"""Engines in this process, on the embedded default model."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hisparse.models.load import default_directory

MIB = 1 << 20
RAW: dict[str, Any] = {"evict": "none", "vtq": {"enable_per_block_quant": False}}
"""Nothing set aside and nothing packed: what remains must give the stock engine's tokens."""


@contextmanager
def engine(
    config: dict[str, Any] | None, memory: int = 256 * MIB, block_tokens: int = 256, **options: Any
) -> Iterator[Any]:
    """A vLLM engine in float32; `config` None for the stock backend, else HiSparse's configuration."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if config is not None:
        additional = {"hisparse": config, "hisparse_block_tokens": block_tokens}
        options = {"attention_backend": "CUSTOM", "additional_config": additional, **options}
    settings: dict[str, Any] = {
        "model": default_directory(),
        "dtype": "float32",
        "max_model_len": 2048,
        "kv_cache_memory_bytes": memory,
        "enforce_eager": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    llm = None
    try:
        llm = LLM(**{**settings, **options})
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: Sequence[Sequence[int]], new: int, **sampling: Any) -> list[list[list[int]]]:
    """Token ids of every completion of every prompt; greedy unless told otherwise."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, "max_tokens": new, "ignore_eos": True, **sampling})
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def capacity(llm: Any) -> int:
    """Tokens that the scheduler believes fit."""
    return int(llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens)


def metric(llm: Any, name: str) -> float:
    """Value of one of the engine's counters or gauges."""
    return float(sum(item.value for item in llm.get_metrics() if item.name == name))


def runtime() -> Any:
    """HiSparse's shared state in this process."""
    from hisparse.integrations.vllm.backend import current_runtime

    return current_runtime()
