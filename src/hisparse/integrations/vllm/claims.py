"""Decoding at a long context without the prefill before it: for benchmarks, whose text means nothing.

The connector claims that all full blocks of a prompt are already there, and fills them with packed random keys and
values::

    --kv-transfer-config '{"kv_connector": "HiSparseClaims", "kv_role": "kv_both",
                           "kv_connector_module_path": "hisparse.integrations.vllm.claims"}'

Key `key_std` of ``kv_connector_extra_config`` is the standard deviation of the keys, 1: which rows a step recalls
depends on how the scores are spread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from hisparse.integrations.vllm.backend import HiSparseAttention, current_runtime
from hisparse.integrations.vllm.filling import Filling
from hisparse.integrations.vllm.metrics import HiSparseMetrics
from hisparse.integrations.vllm.options import Options
from hisparse.integrations.vllm.spec import PackedSpec


@dataclass
class Claimed(KVConnectorMetadata):  # type: ignore[misc]
    """Blocks that the requests of this step were promised: those that begin a request, and the others."""

    first: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)


class HiSparseClaims(HiSparseMetrics):
    """A connector that claims what nobody computed."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.tokens = Options.read(vllm_config.additional_config).block_tokens
        groups = () if kv_cache_config is None else kv_cache_config.kv_cache_groups
        self.group = next((i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, PackedSpec)), 0)
        self.promised = Claimed()
        self.key_std = float(vllm_config.kv_transfer_config.kv_connector_extra_config.get("key_std", 1.0))
        self.fillings: dict[int, Filling] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        whole = (int(request.num_prompt_tokens) - 1) // self.tokens * self.tokens
        return max(whole - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            whole = (int(request.num_prompt_tokens) - 1) // self.tokens
            mine = blocks.get_block_ids()[self.group][:whole]
            self.promised.first += mine[:1]
            self.promised.other += mine[1:]

    def build_connector_meta(self, scheduler_output: Any) -> Claimed:
        promised, self.promised = self.promised, Claimed()
        return promised

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill the blocks that this step's new requests were promised."""
        claimed = self._get_connector_metadata()
        if not isinstance(claimed, Claimed) or not claimed.first:
            return
        runtime = current_runtime()
        for layer in forward_context.no_compile_layers.values():
            attention = getattr(layer, "impl", None)
            if isinstance(attention, HiSparseAttention):
                if attention.index not in self.fillings:
                    memory = runtime.memory(attention.index, layer.kv_cache, attention.scale)
                    self.fillings[attention.index] = Filling(memory, self.key_std)
                self.fillings[attention.index].fill(claimed.first, True)
                self.fillings[attention.index].fill(claimed.other, False)
