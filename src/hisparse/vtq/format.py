"""The page: the one binary layout in which K and V of a few tokens are stored, for all KV heads of a layer.

A page holds, in this order, each field starting at a multiple of 16 bytes and padded with zeros::

    k nibbles [H, P, D/2]    k extra [H, P, X]    v nibbles [H, P, D/2]    v extra [H, P, X]
    k scales  [H, G, 2] int16                     v scales  [H, G, 2] int16

(H KV heads, P tokens, D channels, G channel groups; X = 0, D/8, D/4 bytes for 4, 5, 6 bits.) Heads come first, so the
tokens of one head are contiguous. A raw page holds k [H, P, D] and v [H, P, D] in a float dtype instead.

Channels come in pairs j = 0 .. D/2-1: `a` is channel j and `b` channel j + D/2 of the permuted channels, so that `a`
runs over the slow half of the RoPE frequencies and `b` over the fast half. Group g holds the pairs
``g * group/2 <= j < (g + 1) * group/2``.

* nibble plane: byte j = (a & 15) | (b & 15) << 4
* extra plane, 5 bits: two bits `x` a pair; byte i holds pair ``s * (D/8) + i`` at bit 2 s (s = 0 .. 3).
  Whole block in five bits: a5 = a4 | (x & 1) << 4, b5 = b4 | (x >> 1) << 4. Split block: a6 = a4 | x << 4, b4 alone.
* extra plane, 6 bits: the plane of bits 4..5 of `a` (D/8 bytes), then that of `b`, token by token.
* scales: the upper 16 bits of two float32 (bfloat16): step (> 0; its sign bit set marks a split block) and zero. A code
  c stands for ``zero + c * step``; in a split block the step of `b` is ``step * 4.2`` (63/15).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hisparse.config import VtqConfig
from hisparse.errors import FormatError

FORMAT_VERSION = 1
ALIGN = 16
SPLIT_RATIO = 63 / 15
"""Step of the four-bit half over step of the six-bit half of a split block: both cover the same range."""

_RAW = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class Fields:
    """Where one tensor, K or V, lies in a quantised page: its bit width and the byte offsets of its three fields."""

    bits: int
    nibbles: int
    extra: int
    scales: int


@dataclass(frozen=True)
class PageFormat:
    """Shape and layout of a page; every size below is in bytes.

    `k_bits` and `v_bits` are 4, 5 or 6 for a quantised page and 0 for a raw one (`raw_dtype` set). `group` is the
    number of channels that share a step and a zero. Raises FormatError at construction for a shape that cannot be
    stored.
    """

    tokens: int
    heads: int
    head_dim: int
    k_bits: int = 5
    v_bits: int = 5
    group: int = 64
    raw_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise FormatError(f"page format: {name} = {value!r}; it must be a positive whole number")
        if self.raw_dtype is not None:
            if self.raw_dtype not in _RAW.values():
                raise FormatError(f"page format: raw dtype {self.raw_dtype}; use one of {', '.join(_RAW)}")
            if self.k_bits or self.v_bits:
                raise FormatError("page format: a raw page has no bit width; use PageFormat.raw(...)")
            return
        for name in ("k_bits", "v_bits"):
            if getattr(self, name) not in (4, 5, 6):
                raise FormatError(f"page format: {name} = {getattr(self, name)!r}; use 4, 5 or 6")
        if self.head_dim % 8:
            raise FormatError(
                f"page format: head_dim = {self.head_dim} is not a multiple of 8, which the bit planes need; "
                "keep this model's cache raw (vtq.enable_per_block_quant = false)"
            )
        if self.group < 2 or self.group % 2 or self.head_dim % self.group:
            raise FormatError(
                f"page format: group = {self.group} does not divide head_dim = {self.head_dim} into even groups; "
                f"use {self.head_dim}"
            )

    @classmethod
    def vtq(cls, config: VtqConfig, heads: int, head_dim: int, tokens: int) -> PageFormat:
        """The quantised page of a configuration. `channel_group` that does not fit the head becomes the whole head."""
        group = min(config.channel_group, head_dim)
        if head_dim % group or group % 2:
            group = head_dim
        return cls(tokens, heads, head_dim, config.default_bit_width, config.v_bits, group)

    @classmethod
    def raw(cls, dtype: torch.dtype, heads: int, head_dim: int, tokens: int) -> PageFormat:
        """A page that stores K and V unchanged in `dtype` (float16, bfloat16 or float32)."""
        return cls(tokens, heads, head_dim, 0, 0, head_dim, dtype)

    @classmethod
    def of(cls, config: VtqConfig, heads: int, head_dim: int, tokens: int, dtype: torch.dtype) -> PageFormat:
        """`vtq` or, with `enable_per_block_quant` off, `raw` in the model's `dtype`."""
        if config.enable_per_block_quant:
            return cls.vtq(config, heads, head_dim, tokens)
        return cls.raw(dtype, heads, head_dim, tokens)

    @property
    def is_raw(self) -> bool:
        return self.raw_dtype is not None

    @property
    def groups(self) -> int:
        """Channel groups of a head."""
        return self.head_dim // self.group

    @property
    def nibble_width(self) -> int:
        """Bytes of a token's nibble plane in one head."""
        return self.head_dim // 2

    @property
    def k_extra_width(self) -> int:
        """Bytes of a token's extra K plane in one head: D/8 for each bit over four."""
        return (self.k_bits - 4) * (self.head_dim // 8)

    @property
    def v_extra_width(self) -> int:
        return (self.v_bits - 4) * (self.head_dim // 8)

    @cached_property
    def _layout(self) -> tuple[int, ...]:
        """Offsets of the six fields (raw: of k and v) and the end of the page."""
        rows = self.heads * self.tokens
        if self.raw_dtype is not None:
            sizes = [rows * self.head_dim * self.raw_dtype.itemsize] * 2
        else:
            scales = self.heads * self.groups * 4
            sizes = [rows * self.nibble_width, rows * self.k_extra_width]
            sizes += [rows * self.nibble_width, rows * self.v_extra_width, scales, scales]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + _aligned(size))
        return tuple(offsets)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, a multiple of 16."""
        return self._layout[-1]

    @property
    def k_nibble_offset(self) -> int:
        return self._layout[0]

    @property
    def k_extra_offset(self) -> int:
        return self._layout[1]

    @property
    def v_nibble_offset(self) -> int:
        return self._layout[2]

    @property
    def v_extra_offset(self) -> int:
        return self._layout[3]

    @property
    def k_scale_offset(self) -> int:
        return self._layout[4]

    @property
    def v_scale_offset(self) -> int:
        return self._layout[5]

    @cached_property
    def k(self) -> Fields:
        return Fields(self.k_bits, self.k_nibble_offset, self.k_extra_offset, self.k_scale_offset)

    @cached_property
    def v(self) -> Fields:
        return Fields(self.v_bits, self.v_nibble_offset, self.v_extra_offset, self.v_scale_offset)

    @property
    def raw_v_offset(self) -> int:
        """Offset of V in a raw page (K starts at 0)."""
        return self._layout[1]

    @property
    def bits_per_value(self) -> float:
        """Stored bits a value of K and V, scales and padding included."""
        return self.page_bytes * 8 / (2 * self.tokens * self.heads * self.head_dim)

    def to_json(self) -> str:
        """Versioned JSON text that :meth:`from_json` reads back to an equal format."""
        fields: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "tokens": self.tokens,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "k_bits": self.k_bits,
            "v_bits": self.v_bits,
            "group": self.group,
            "raw_dtype": None if self.raw_dtype is None else str(self.raw_dtype).removeprefix("torch."),
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> PageFormat:
        """Read what :meth:`to_json` wrote; FormatError for broken JSON, another version, or a bad or missing key."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise FormatError(f"page format: not JSON ({error}); it must come from PageFormat.to_json") from None
        if not isinstance(fields, dict) or "version" not in fields:
            raise FormatError("page format: no version in the JSON text; it must come from PageFormat.to_json")
        version = fields.pop("version")
        if version != FORMAT_VERSION:
            raise FormatError(
                f"page format: version {version!r}, but this hisparse reads {FORMAT_VERSION}; "
                "use the hisparse version that wrote the pages, or write them again"
            )
        names = set(cls.__dataclass_fields__)
        if set(fields) != names:
            wrong = sorted(set(fields) ^ names)
            raise FormatError(f"page format: keys {wrong} are unknown or missing; expected {sorted(names)}")
        raw = fields["raw_dtype"]
        if raw is not None and raw not in _RAW:
            raise FormatError(f"page format: raw dtype {raw!r}; use one of {', '.join(_RAW)}")
        for name in sorted(names - {"raw_dtype"}):
            if not isinstance(fields[name], int):
                raise FormatError(f"page format: {name} = {fields[name]!r}; it must be a whole number")
        fields["raw_dtype"] = None if raw is None else _RAW[raw]
        return cls(**fields)

    def to_metadata(self) -> dict[str, str]:
        """String pairs for a safetensors header."""
        return {"hisparse.page_format": self.to_json()}

    @classmethod
    def from_metadata(cls, metadata: dict[str, str]) -> PageFormat:
        if "hisparse.page_format" not in metadata:
            raise FormatError("page format: the file's metadata has no hisparse.page_format; it holds no pages")
        return cls.from_json(metadata["hisparse.page_format"])
