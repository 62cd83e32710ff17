"""vLLM's CPU platform, which otherwise takes its own attention backend whatever is asked for."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class HiSparseCpuPlatform(CpuPlatform):  # type: ignore[misc]
    """As `CpuPlatform`, but ``--attention-backend CUSTOM`` is honoured."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend == AttentionBackendEnum.CUSTOM:
            backend = AttentionBackendEnum.CUSTOM.get_class()
            backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
            return str(AttentionBackendEnum.CUSTOM.get_path())
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
