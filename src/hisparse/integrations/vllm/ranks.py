"""This process among the tensor-parallel ones."""

from __future__ import annotations

from torch import Tensor


def rank() -> tuple[int, int]:
    """Its number, and how many there are."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return int(get_tensor_model_parallel_rank()), int(get_tensor_model_parallel_world_size())


def all_heads(values: Tensor, total: int) -> Tensor:
    """Values [m, W, H, D] of this rank's heads with those of all other ranks: [m, W, total, D]."""
    _, ranks = rank()
    if ranks == 1:
        return values
    from vllm.distributed import tensor_model_parallel_all_gather

    every: Tensor = tensor_model_parallel_all_gather(values.contiguous(), dim=2)
    return every[:, :, :: max(1, every.shape[2] // total)]
