"""What vLLM's memory manager is told: blocks that stand for many tokens, and rings of blocks for the dense ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hisparse.integrations.vllm.compat import (
    AttentionSpec,
    FullAttentionManager,
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheSpecRegistry,
    SingleTypeKVCacheManager,
    VllmConfig,
    replace_as,
)
from hisparse.integrations.vllm.layout import BlockLayout


@dataclass(frozen=True, kw_only=True)
class PackedSpec(FullAttentionSpec):  # type: ignore[misc]
    """A full-attention layer whose blocks are packed when they are full."""


class PackedManager(FullAttentionManager):  # type: ignore[misc]
    """Lets a block be found in the prefix cache once the step that fills it is over.

    vLLM's manager offers a block as soon as the step is scheduled: another request of the same step may then read what
    is still being written. Keys and values written token by token stand that; a block that is packed when it is full
    does not.
    """

    def __init__(self, kv_cache_spec: PackedSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.requests: dict[str, Any] = {}

    def cache_blocks(
        self, request: Any, num_tokens: int, retention_interval: int | None = None, *, replay_boundaries: Sequence[int]
    ) -> None:
        self.requests[request.request_id] = request
        done = min(num_tokens, int(request.num_computed_tokens))
        super().cache_blocks(request, done, retention_interval, replay_boundaries=replay_boundaries)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        request = self.requests.pop(request_id, None)
        if request is not None and self.enable_caching and request_id in self.req_to_blocks:
            done = min(int(request.num_computed_tokens), int(request.num_tokens))
            super().cache_blocks(request, done, replay_boundaries=())
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks


def packed_spec(spec: FullAttentionSpec, layout: BlockLayout) -> PackedSpec:
    """The spec of a full-attention layer whose blocks are opaque bytes of `layout`."""
    packed: PackedSpec = replace_as(
        spec,
        PackedSpec,
        block_size=layout.tokens,
        dtype=torch.uint8,
        num_head_slots=1,
        tokens_per_state=layout.tokens,
        state_content_bytes=layout.block_bytes,
    )
    return packed


@dataclass(frozen=True, kw_only=True)
class RingSpec(AttentionSpec):  # type: ignore[misc]
    """A ring of blocks that holds a request's dense tokens: the block being filled, and the tail before it.

    `block_size` is that of the packed blocks, to which prefix-cache hits are aligned; it says nothing about how many
    tokens a block of the ring holds (`ring_tokens`).
    """

    ring_tokens: int
    ring_blocks: int

    @classmethod
    def of(cls, layout: BlockLayout) -> RingSpec:
        return cls(
            block_size=layout.tokens,
            num_kv_heads=layout.heads,
            head_size=layout.head_dim,
            dtype=torch.uint8,
            num_head_slots=1,
            tokens_per_state=layout.tokens,
            state_content_bytes=layout.block_bytes,
            ring_tokens=layout.ring_tokens,
            ring_blocks=layout.ring_blocks,
        )

    @property
    def prefix_cacheable(self) -> bool:
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    @property
    def block_table_token_alignment(self) -> int | None:
        return None

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        longest = -(-vllm_config.model_config.max_model_len // self.ring_tokens)
        return int(min(self.ring_blocks, longest) * self.page_size_bytes)

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        return int(-(-max_len // self.block_size) + self.ring_blocks)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(spec == self for spec in kv_cache_specs.values())


class RingManager(SingleTypeKVCacheManager):  # type: ignore[misc]
    """Gives every request its ring, block by block as it grows.

    A request's row begins with a null block for each packed block that it found in the prefix cache, which is how the
    worker learns from where on the ring holds tokens.
    """

    def __init__(self, kv_cache_spec: RingSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.spec = kv_cache_spec

    def _ring(self, tokens: int) -> int:
        return min(self.spec.ring_blocks, -(-max(tokens, 0) // self.spec.ring_tokens))

    def _lead(self, request_id: str) -> int:
        """Null blocks of a request, all in front of its ring: asked for twice a step, of thousands of blocks."""
        blocks = self.req_to_blocks.get(request_id, ())
        return bisect_left(blocks, True, key=lambda block: block is not self._null_block)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        blocks = self.req_to_blocks.get(request_id)
        lead = self._lead(request_id) if blocks else total_computed_tokens // self.block_size
        owned = len(blocks) - lead if blocks else 0
        return max(self._ring(num_tokens - lead * self.block_size) - owned, 0)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Any],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        lead = (num_local_computed_tokens + num_external_computed_tokens) // self.block_size
        self.req_to_blocks[request_id].extend([self._null_block] * lead)

    def allocate_external_computed_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Tokens that a connector brings are packed ones: the ring stays empty."""

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        blocks = self.req_to_blocks[request_id]
        lead = self._lead(request_id)
        missing = self._ring(num_tokens - lead * self.block_size) - (len(blocks) - lead)
        if missing <= 0:
            return []
        new: list[Any] = self.block_pool.get_new_blocks(missing)
        blocks.extend(new)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in new)
        return new

    def cache_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Rings are never shared."""

    @classmethod
    def find_longest_cache_hit(
        cls, *, kv_cache_group_ids: list[int], **kwargs: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        return tuple([] for _ in kv_cache_group_ids), 0


def register_specs() -> None:
    """Tell vLLM which managers serve packed blocks and rings; calling it again changes nothing."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(PackedSpec, PackedManager, uniform_type_base_spec=FullAttentionSpec)
    KVCacheSpecRegistry.register(RingSpec, RingManager, uniform_type_base_spec=RingSpec)


register_specs()
