"""What a cache holds, in numbers that the allocator agrees with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CacheReport:
    """Bytes and tokens of a whole cache (all sequences, all layers that HiSparse holds).

    dense_bytes: what the same tokens take in a dense bf16 cache. gpu_bytes: what lies on the device (the CPU, on a
    machine without GPU), with tables, sketches, tail and spare rows. capacity: the first over the second. Channel
    statistics and the scorer's weights belong to the model, not to a context: `model_bytes`, not part of gpu_bytes.
    """

    dense_bytes: int
    gpu_bytes: int
    host_bytes: int
    model_bytes: int
    device: dict[str, int]
    tokens: dict[str, int]
    blocks: int
    recall: dict[str, int]

    @property
    def capacity(self) -> float:
        return self.dense_bytes / self.gpu_bytes if self.gpu_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "capacity": self.capacity}
