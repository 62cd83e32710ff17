"""Decoding at a long context without the prefill before it: for benchmarks, whose text means nothing.

The connector claims that all full blocks of a prompt are already there, and fills every block of the pool once, with
packed random keys and values::

    --kv-transfer-config '{"kv_connector": "HiSparseClaims", "kv_role": "kv_both",
                           "kv_connector_module_path": "hisparse.integrations.vllm.claims"}'
"""

from __future__ import annotations

from typing import Any

from hisparse.integrations.vllm.backend import HiSparseAttention, current_runtime
from hisparse.integrations.vllm.filling import fill
from hisparse.integrations.vllm.metrics import HiSparseMetrics
from hisparse.integrations.vllm.options import Options


class HiSparseClaims(HiSparseMetrics):
    """A connector that claims what nobody computed."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.tokens = Options.read(vllm_config.additional_config).block_tokens
        self.filled = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        whole = (int(request.num_prompt_tokens) - 1) // self.tokens * self.tokens
        return max(whole - num_computed_tokens, 0), False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill the pool before the first step."""
        if self.filled:
            return
        self.filled = True
        runtime = current_runtime()
        for layer in forward_context.no_compile_layers.values():
            attention = getattr(layer, "impl", None)
            if isinstance(attention, HiSparseAttention):
                fill(runtime.memory(attention.index, layer.kv_cache, attention.scale))
