"""Engines in this process, on the embedded default model."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hisparse.models.load import default_directory

MIB = 1 << 20
RAW: dict[str, Any] = {"evict": "none", "vtq": {"enable_per_block_quant": False}}
"""Nothing set aside and nothing packed: what remains must give the stock engine's tokens."""
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.3,
}
"""Of small models whose weights are random, but sharp enough that their tokens differ."""


CALIBRATION = "apart/calibration.safetensors"
"""In the folder of a model with random weights, but where it is not taken for weights. An engine on a GPU wants one
before the first token."""


def save_random(config: Any, folder: Path) -> Path:
    """`folder`, in which a model of the transformers `config` lies, with random weights in float32, and CALIBRATION."""
    import torch
    from transformers import AutoModelForCausalLM

    from hisparse.identity import ModelIdentity
    from hisparse.vtq.calibration import save_calibration
    from hisparse.vtq.stats import ChannelStats, channel_order

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    own = ModelIdentity.of(model)
    plain = ChannelStats.identity(own.kv_heads, own.head_dim, channel_order(config, own.head_dim))
    plain = replace(plain, key_basis=plain.sketch_basis)
    save_calibration(folder / CALIBRATION, [plain] * own.layers, own, "nothing: values are stored as they are")
    return folder


def small_llama(folder: Path) -> Path:
    """`folder`, in which a random Llama of three layers lies, whose heads two ranks can share."""
    from transformers import LlamaConfig

    return save_random(LlamaConfig(**SIZES, num_hidden_layers=3, max_position_embeddings=1024), folder)


SMALL: dict[str, Any] = {"max_model_len": 1024, "skip_tokenizer_init": True}
"""Options of an engine for :func:`small_llama`."""


def random_prompts(*lengths: int) -> list[list[int]]:
    """Prompts of a small model's tokens."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 512, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def engine(
    config: dict[str, Any] | None, memory: int = 256 * MIB, block_tokens: int = 256, **options: Any
) -> Iterator[Any]:
    """A vLLM engine in float32; `config` None for the stock backend, else HiSparse's configuration.

    On a GPU with CUDA graphs, but not compiled, and with the model's CALIBRATION if it has one.
    """
    import torch
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if config is not None:
        additional: dict[str, Any] = {"hisparse": config, "hisparse_block_tokens": block_tokens}
        calibration = Path(options.get("model", "")) / CALIBRATION
        if torch.cuda.is_available() and calibration.is_file():
            additional["hisparse_calibration"] = str(calibration)
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
    if torch.cuda.is_available():
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        settings.update(enforce_eager=False, compilation_config=graphs)
        settings["gpu_memory_utilization"] = 0.1  # other engines may share the GPU
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
