"""The attention shapes of models people run at long context."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.errors import InputError


@dataclass(frozen=True)
class Shape:
    """Layers, query heads, KV heads, channels a head, width of the hidden state."""

    layers: int
    q_heads: int
    heads: int
    dim: int
    hidden: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V of one layer in bfloat16."""
        return 4 * self.heads * self.dim


SHAPES = {
    "glm4-9b-1m": Shape(40, 32, 4, 128, 4096),
    "llama3.1-8b": Shape(32, 32, 8, 128, 4096),
    "qwen2.5-7b-1m": Shape(28, 28, 4, 128, 3584),
    "qwen2.5-72b": Shape(80, 64, 8, 128, 8192),
    "qwen2.5-0.5b": Shape(24, 14, 2, 64, 896),
}


def shape_of(name: str) -> Shape:
    """Raises InputError for a name that is not in SHAPES."""
    if name not in SHAPES:
        raise InputError(f"shape {name!r} is not known; use one of {', '.join(SHAPES)}")
    return SHAPES[name]
