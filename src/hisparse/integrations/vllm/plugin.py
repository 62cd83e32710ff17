"""vLLM's entry points into HiSparse; see pyproject.toml."""

from __future__ import annotations


def register() -> None:
    """`vllm.general_plugins`: make the backend known under the name CUSTOM. Imports no more than it has to."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "hisparse.integrations.vllm.backend.HiSparseBackend")


def platform() -> str | None:
    """`vllm.platform_plugins`: on a CPU build of vLLM, a platform that honours ``--attention-backend CUSTOM``."""
    from vllm.platforms import vllm_version_matches_substr

    return "hisparse.integrations.vllm.platform.HiSparseCpuPlatform" if vllm_version_matches_substr("cpu") else None
