"""The page format: sizes, construction, and its text form."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.config import VtqConfig
from hisparse.errors import FormatError
from hisparse.vtq import PageFormat

FORMATS = [
    PageFormat.vtq(VtqConfig(default_bit_width=bits, value_bit_width=v_bits), heads, dim, tokens)
    for bits in (4, 5, 6)
    for v_bits in (None, 4, 6)
    for heads, dim, tokens in ((3, 64, 8), (8, 128, 4), (1, 96, 1), (2, 256, 13))
] + [PageFormat.raw(dtype, 3, 20, 5) for dtype in (torch.float16, torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_text_form_reads_back_equal(fmt: PageFormat) -> None:
    assert PageFormat.from_json(fmt.to_json()) == fmt
    assert PageFormat.from_metadata(fmt.to_metadata()) == fmt
    assert hash(PageFormat.from_json(fmt.to_json())) == hash(fmt)


@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 16),
    eighths=st.integers(1, 32),
    k_bits=st.integers(4, 6),
    v_bits=st.integers(4, 6),
    group=st.integers(8, 300),
)
def test_a_page_is_its_fields_each_padded_to_16_bytes(
    tokens: int, heads: int, eighths: int, k_bits: int, v_bits: int, group: int
) -> None:
    dim = 8 * eighths
    config = VtqConfig(default_bit_width=k_bits, value_bit_width=v_bits, channel_group=group)
    fmt = PageFormat.vtq(config, heads, dim, tokens)
    values, scales = tokens * heads * dim, heads * (dim // fmt.group) * 4
    sizes = [values // 2, (k_bits - 4) * values // 8, values // 2, (v_bits - 4) * values // 8, scales, scales]
    offsets = (*(getattr(fmt.k, f) for f in ("nibbles", "extra")), *(getattr(fmt.v, f) for f in ("nibbles", "extra")))
    offsets += (fmt.k.scales, fmt.v.scales, fmt.page_bytes)
    for start, size, end in zip(offsets, sizes, offsets[1:], strict=False):
        assert start % 16 == 0
        assert end == start + math.ceil(size / 16) * 16
    assert dim % fmt.group == 0
    assert fmt.group == (min(group, dim) if dim % min(group, dim) == 0 and min(group, dim) % 2 == 0 else dim)


def test_default_page_of_eight_tokens_spends_little_over_five_bits() -> None:
    fmt = PageFormat.vtq(VtqConfig(), heads=8, head_dim=128, tokens=8)
    assert fmt.page_bytes == 2 * (8 * 8 * 128 * 5 // 8) + 2 * (8 * 2 * 4)
    assert fmt.bits_per_value == 5.0625


def test_quantisation_off_means_raw_pages_in_the_models_dtype() -> None:
    config = VtqConfig(enable_per_block_quant=False)
    assert PageFormat.of(config, 3, 60, 8, torch.bfloat16) == PageFormat.raw(torch.bfloat16, 3, 60, 8)
    assert PageFormat.of(VtqConfig(), 3, 64, 8, torch.bfloat16) == PageFormat.vtq(VtqConfig(), 3, 64, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "tokens = 0"),
        ({"heads": -1}, "heads = -1"),
        ({"head_dim": 60, "group": 60}, "head_dim = 60 is not a multiple of 8"),
        ({"k_bits": 3}, "k_bits = 3; use 4, 5 or 6"),
        ({"v_bits": 8}, "v_bits = 8"),
        ({"group": 48}, "group = 48 does not divide head_dim = 64"),
        ({"group": 1}, "group = 1"),
        ({"raw_dtype": torch.int8}, "raw dtype torch.int8"),
        ({"raw_dtype": torch.float32}, "a raw page has no bit width"),
    ],
)
def test_a_format_that_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        PageFormat(**{"tokens": 8, "heads": 3, "head_dim": 64, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99, but this hisparse reads 1"),
        ({"tokens": "8"}, "tokens = '8'"),
        ({"raw_dtype": "float8"}, "raw dtype 'float8'"),
        ({"color": 1}, "color"),
        ({"k_bits": 7}, "k_bits = 7"),
    ],
)
def test_damaged_text_is_refused(change: dict[str, object], message: str) -> None:
    fields = json.loads(PageFormat(8, 3, 64).to_json())
    with pytest.raises(FormatError, match=message):
        PageFormat.from_json(json.dumps({**fields, **change}))


def test_text_of_something_else_is_refused() -> None:
    for text in ("", "[]", "{}", "null"):
        with pytest.raises(FormatError, match=r"PageFormat\.to_json"):
            PageFormat.from_json(text)
    with pytest.raises(FormatError, match="holds no pages"):
        PageFormat.from_metadata({"format": "pt"})
