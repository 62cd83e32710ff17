"""The attention backend that vLLM calls: its specs, its metadata and its layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.errors import FormatError, UnsupportedError
from hisparse.integrations.vllm.compat import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayerBase,
    AttentionMetadataBuilder,
    FullAttentionSpec,
    KVCacheLayout,
    VllmConfig,
    check_version,
    get_current_vllm_config,
)
from hisparse.integrations.vllm.options import Asked, refuse_layer
from hisparse.integrations.vllm.runtime import Metadata, Runtime
from hisparse.integrations.vllm.spec import RingSpec, packed_spec
from hisparse.ops._dispatch import backend_for

_RUNTIMES: dict[str, tuple[Any, Runtime]] = {}
"""The engine whose model was built last in this process: vLLM asks classes, not objects, for specs."""
_KEY = "engine"


def current_runtime(vllm_config: Any | None = None) -> Runtime:
    """The runtime of the engine in this process, or of `vllm_config` where it is given.

    Raises FormatError where no layer was built yet.
    """
    known = _RUNTIMES.get(_KEY)
    if known is None or (vllm_config is not None and known[0] is not vllm_config.compilation_config):
        raise FormatError("no HiSparse layer was built in this process; start vLLM with --attention-backend CUSTOM")
    return known[1]


class _Builder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Hands vLLM's metadata of one group to the runtime; both groups' builders return the same object."""

    kind: ClassVar[str] = "pages"

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.runtime = current_runtime(vllm_config)
        self.runtime.check_group(len(layer_names), int(kv_cache_spec.block_size), int(kv_cache_spec.page_size_bytes))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        """Steps of one token a request can be captured where the kernels that they need do not wait for the device."""
        device = torch.device(vllm_config.device_config.device_type, 0)
        ready = device.type == "cuda" and all(backend_for(op, device) != "reference" for op in ("decode", "scan"))
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if ready else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        return self.runtime.offer(self.kind, common_attn_metadata)


class _RingBuilder(_Builder):
    kind: ClassVar[str] = "ring"


class HiSparseBackend(AttentionBackend):  # type: ignore[misc]
    """Attention over packed blocks, the dense ring, and recalled rows."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "float32"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HiSparseAttention]:
        return HiSparseAttention

    @staticmethod
    def get_builder_cls() -> type[_Builder]:
        return _Builder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """It does not, but says so itself, when the layer is made, with what to do about it."""
        return True

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """No reasons: UnsupportedError where there are some, for vLLM's own words name neither value nor remedy."""
        Asked(cache_dtype=asked["kv_cache_dtype"] or "auto", mla=asked["use_mla"]).check(HiSparseConfig())
        if not cls.supports_dtype(asked["dtype"]):
            raise UnsupportedError(
                f"--dtype {str(asked['dtype']).removeprefix('torch.')} with --attention-backend CUSTOM (HiSparse): "
                "say bfloat16, float16 or float32, or use a stock backend"
            )
        if reasons := super().validate_configuration(**asked):
            raise UnsupportedError(f"--attention-backend CUSTOM (HiSparse): {'; '.join(reasons)}; use a stock backend")
        return []

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        known = _RUNTIMES.get(_KEY)
        if known is None or not isinstance(spec, FullAttentionSpec):
            return spec
        return packed_spec(spec, known[1].layout)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (KVCacheLayout.LBHNC,)


class _RingBackend(HiSparseBackend):
    """The same memory seen as rings; computes nothing."""

    @staticmethod
    def get_builder_cls() -> type[_Builder]:
        return _RingBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return spec


class RingLayer(AttentionLayerBase):  # type: ignore[misc]
    """Makes vLLM give every request a ring in the memory of one layer. It has no weights and is never called."""

    def __init__(self, runtime: Runtime, num_heads: int) -> None:
        self.runtime, self.num_heads = runtime, num_heads
        self.kv_cache = torch.tensor([])

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Called when vLLM has decided how many blocks there are, before the server says that it is ready."""
        super().bind_kv_cache(kv_cache)
        self.runtime.check_host(len(kv_cache))

    def get_attn_backend(self) -> type[Any]:
        return _RingBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        return RingSpec.of(self.runtime.layout)


class HiSparseAttention(AttentionImpl):  # type: ignore[misc]
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        check_version()
        attn_type = str(getattr(attn_type, "value", attn_type))
        refuse_layer(alibi_slopes, sliding_window, logits_soft_cap, attn_type, kv_sharing_target_layer_name, extra)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        vllm_config = get_current_vllm_config()
        compilation = vllm_config.compilation_config
        known = _RUNTIMES.get(_KEY)
        if known is None or known[0] is not compilation:
            runtime = Runtime(vllm_config, self.num_kv_heads, head_size, vllm_config.model_config.dtype)
            _RUNTIMES[_KEY] = (compilation, runtime)
        self.runtime = _RUNTIMES[_KEY][1]
        self.runtime.check_dimensions(self.num_kv_heads, head_size)
        others = [
            name for name, layer in compilation.static_forward_context.items() if not isinstance(layer, RingLayer)
        ]
        self.index = self.runtime.add_layer(len(others))
        compilation.static_forward_context[f"hisparse.{self.index}.ring"] = RingLayer(self.runtime, num_heads)

    @torch.no_grad()
    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, Hq, D]; key, value [T, H, D]; output [T, Hq, D] is written and returned."""
        if attn_metadata is None or attn_metadata.step is None or not kv_cache.numel():
            return output.zero_()  # vLLM measures memory
        metadata, step = attn_metadata, attn_metadata.step
        memory = self.runtime.memory(self.index, kv_cache, self.scale)
        for chunk in metadata.chunks:
            here = slice(chunk.start, chunk.end)
            q, k, v = query[here], key[here], value[here]
            output[here] = memory.prefill(q, k, v, step, chunk.row, chunk.past, chunk.packed)
            self.runtime.commit(self.index, memory, metadata, chunk, (q, k, v))
        if metadata.single is not None:
            # Without a list every token of the batch is a request's only one; what lies beyond is padding.
            now = slice(0, len(metadata.single.past)) if metadata.singles is None else metadata.singles
            target = output[now] if metadata.singles is None and output.is_contiguous() else None
            if target is not None and target.dtype != query.dtype:
                target = None
            found = memory.decode(query[now], key[now], value[now], metadata.single, target)
            if found is not target:
                output[now] = found
        return output
