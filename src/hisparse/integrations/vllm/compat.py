"""The one place that names vLLM's interfaces, and says which versions of vLLM they were tried with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import vllm
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, replace_as
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from hisparse.errors import UnsupportedError

TESTED = ("0.32.",)

__all__ = [
    "AttentionBackend",
    "AttentionBackendEnum",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionLayerBase",
    "AttentionMetadataBuilder",
    "AttentionSpec",
    "AttentionType",
    "CommonAttentionMetadata",
    "FullAttentionManager",
    "FullAttentionSpec",
    "KVCacheLayout",
    "KVCacheSpec",
    "KVCacheSpecRegistry",
    "SingleTypeKVCacheManager",
    "VllmConfig",
    "check_version",
    "flash_attention_3",
    "get_current_vllm_config",
    "register_backend",
    "replace_as",
]


def check_version(version: str | None = None) -> None:
    """Raise UnsupportedError unless vLLM (or `version`) is one that HiSparse was tested with."""
    found = vllm.__version__ if version is None else version
    if not str(found).startswith(TESTED):
        raise UnsupportedError(
            f"vLLM {found}: HiSparse was tested with {', '.join(t + 'x' for t in TESTED)} only; "
            "pip install -e '.[vllm]' in HiSparse's source tree, or choose another --attention-backend"
        )


def flash_attention_3() -> Callable[..., Any] | None:
    """What vLLM's CUDA wheel has, for `hisparse.ops.attend.flash3`; None where this device or wheel has none."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return None
    return partial(flash_attn_varlen_func, fa_version=3) if is_fa_version_supported(3) else None
