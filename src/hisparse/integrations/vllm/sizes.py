"""How many bytes the host has, and how many of the device are for KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def free_memory() -> int | None:
    """Bytes of host memory that can be had without swapping; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def kv_memory(vllm_config: Any) -> int:
    """Bytes for blocks and hot buffers on this rank: what the user says, else all that vLLM may use."""
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes:
        return int(cache.kv_cache_memory_bytes)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return int(total * cache.gpu_memory_utilization)
