"""The fixed sizes of a vLLM block that stands for many tokens, and the search for the sizes that meet a byte target.

A block of `tokens` consecutive tokens of one layer takes `block_bytes`::

    kept page 0 | kept page 1 | ...                    ... | row 1 | row 0
    from the front, page_stride apart                 from the back, row_stride apart

A kept page holds `page.tokens` tokens, a row's record the sketch of `row.tokens` tokens (its packed values lie in the
host pool, or behind the sketch where rows stay on the device). Both strides divide `block_bytes`, so that all blocks
together are one array of pages, and one of rows. The first block of a sequence begins with `head` tokens in the model's
dtype, the sinks, in place of its first pages.

The same bytes, used as part of a ring, hold `ring_tokens` tokens in the model's dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from hisparse.cache.geometry import SINKS
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.ops.sketch import sketch_bytes
from hisparse.vtq.format import PageFormat

ALIGN = 16
DEFAULT_TOKENS = 256


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@lru_cache(maxsize=1024)
def _stride(block_bytes: int, record: int) -> int:
    """The smallest divisor of `block_bytes` that is a multiple of ALIGN and holds `record` bytes; 0 for none."""
    whole, least = block_bytes // ALIGN, -(-record // ALIGN)
    root = math.isqrt(whole)
    # Of two numbers whose product is `whole`, one is at most its root: no more than that many are tried.
    for stride in range(least, root + 1):
        if whole % stride == 0:
            return stride * ALIGN
    for number in range(min(whole // least, root), 0, -1):
        if whole % number == 0:
            return whole // number * ALIGN
    return 0


@dataclass(frozen=True)
class Counts:
    """What a block holds: `pages` kept pages and `rows` rows."""

    pages: int
    rows: int


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of a block; see the module. `tail`: newest tokens that stay dense whatever their block."""

    tokens: int
    tail: int
    page: PageFormat
    row: PageFormat
    dtype: torch.dtype
    sketch_bits: int
    rows_on_device: bool
    block_bytes: int
    page_stride: int
    row_stride: int
    first: Counts
    other: Counts

    @property
    def heads(self) -> int:
        return self.page.heads

    @property
    def head_dim(self) -> int:
        return self.page.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V in the model's dtype."""
        return 2 * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def has_rows(self) -> bool:
        """False where nothing is set aside, or what is set aside is dropped."""
        return self.row_stride > 0

    @property
    def head(self) -> int:
        """Tokens in the model's dtype at the start of a sequence's first block."""
        return head_tokens(self.page.tokens, self.row.tokens)

    @property
    def head_pages(self) -> int:
        """Pages whose place the head takes."""
        return -(-self.head * self.token_bytes // self.page_stride)

    @property
    def ring_tokens(self) -> int:
        """Dense tokens that fit a block of the ring."""
        return self.block_bytes // self.token_bytes

    @property
    def ring_blocks(self) -> int:
        """Blocks of a request's ring: room for the block being filled and the tail before it."""
        return -(-(self.tokens + self.tail) // self.ring_tokens)

    @property
    def ring_slots(self) -> int:
        return self.ring_blocks * self.ring_tokens

    @property
    def pages_per_block(self) -> int:
        """Page records in a block's bytes, used or not: page j of block b is record ``b * pages_per_block + j``."""
        return self.block_bytes // self.page_stride

    @property
    def rows_per_block(self) -> int:
        """Row records in a block's bytes: row j of block b is record ``(b + 1) * rows_per_block - 1 - j``."""
        return self.block_bytes // self.row_stride if self.has_rows else 0

    @property
    def host_rows(self) -> int:
        """Rows of a block in the host pool."""
        return max(self.first.rows, self.other.rows) if self.has_rows and not self.rows_on_device else 0

    def host_id(self, records: Tensor) -> Tensor:
        """The host pool's rows that row records belong to: blocks have `host_rows` each, in the order of records."""
        block, record = records // self.rows_per_block, records % self.rows_per_block
        return block * self.host_rows + record - self.host_lead

    @property
    def host_lead(self) -> int:
        """Records of a block that come before its first row."""
        return self.rows_per_block - self.host_rows

    @property
    def host_block_bytes(self) -> int:
        """Bytes of a block in the host pool, one layer."""
        return self.host_rows * self.row.page_bytes

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's sketch codes; its scales follow."""
        return self.row.tokens * self.heads * (sketch_bytes(self.head_dim, self.sketch_bits) - 1)

    @property
    def scale_bytes(self) -> int:
        return self.row.tokens * self.heads

    @cached_property
    def row_page_offset(self) -> int:
        """Where a row's packed values begin in its record, where rows lie on the device."""
        return _up(self.code_bytes + self.scale_bytes, ALIGN)

    def blocks(self, context: int) -> int:
        """Blocks of a layer that a request of `context` tokens takes, those of its ring included."""
        return _blocks(self.tokens, self.tail, self.ring_tokens, context)

    def capacity(self, context: int) -> float:
        """Bytes of `context` tokens in a dense bfloat16 cache over the bytes of the blocks they take here."""
        return _capacity(self.page, self.tokens, self.tail, self.token_bytes, self.block_bytes, context)


def _blocks(tokens: int, tail: int, ring_tokens: int, context: int) -> int:
    return -(-context // tokens) + min(-(-(tokens + tail) // ring_tokens), -(-context // ring_tokens))


def _capacity(page: PageFormat, tokens: int, tail: int, token_bytes: int, block_bytes: int, context: int) -> float:
    blocks = _blocks(tokens, tail, block_bytes // token_bytes, context)
    return context * 4 * page.heads * page.head_dim / (blocks * block_bytes)


def head_tokens(page_tokens: int, row_tokens: int) -> int:
    """Sinks, and as many more tokens as let the rest of a block fall into whole pages and rows."""
    return _up(SINKS, math.lcm(page_tokens, row_tokens))


def choose_layout(
    config: HiSparseConfig,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    context: int,
    tokens: int = DEFAULT_TOKENS,
    beside: float = 0.0,
) -> BlockLayout:
    """The layout that keeps most tokens within the configuration's byte target at `context` tokens a request.

    heads: KV heads on this rank; beside: share of the KV memory that is not blocks. Where no layout meets
    `budget.capacity` (a short context, whose dense tail weighs too much) and `selection.sketch_bits` was not given,
    sketches of one bit are tried. Where they do not meet it either, the smallest block of the configuration is taken;
    compare :meth:`BlockLayout.capacity`. Raises ConfigError for block sizes that cannot be cut into pages and rows or
    that no request fills, FormatError for head sizes that pages or sketches cannot hold.
    """
    vtq, selection = config.vtq, config.selection
    quantised = vtq.enable_per_block_quant

    def fmt(size: int) -> PageFormat:
        return PageFormat.vtq(vtq, heads, head_dim, size) if quantised else PageFormat.raw(dtype, heads, head_dim, size)

    page = fmt(vtq.page_tokens())
    row = fmt(selection.row_size if config.evict == "host" else vtq.page_tokens())
    head = head_tokens(page.tokens, row.tokens)
    unit = math.lcm(page.tokens, row.tokens)
    usual = _up(max(DEFAULT_TOKENS, 2 * head), unit)
    if tokens % unit or tokens < 2 * head:
        raise ConfigError(
            f"hisparse_block_tokens = {tokens}: a block has to be at least {2 * head} tokens and a multiple of "
            f"vtq.page_size = {page.tokens} and selection.row_size = {row.tokens}; use {usual}"
        )
    if tokens > max(context, usual):
        raise ConfigError(
            f"hisparse_block_tokens = {tokens}: only whole blocks are packed, and no request has more than {context} "
            f"tokens (--max-model-len, or the model's window); use {usual}"
        )
    search = _Search(config, page, row, dtype, tokens, head, selection.sketch_bits)
    target = config.budget.capacity
    if config.evict == "none" or target is None:
        return search.smallest(search.most)
    best = _best(search, context, target / (1 - beside))
    if best is None and config.evict == "host" and "sketch_bits" not in selection.model_fields_set:
        best = _best(replace(search, sketch_bits=1), context, target / (1 - beside))
    return best or search.smallest(search.least)


def _best(search: _Search, context: int, target: float) -> BlockLayout | None:
    """The layout that keeps most tokens at capacity `target`."""
    tokens, tail, token_bytes = search.tokens, search.config.tlif.prefix_length, search.token_bytes
    channels = search.page.heads * search.page.head_dim
    dense = tokens * 4 * channels
    # No larger blocks meet the target, even if the ring took no more than its tokens in the model's dtype.
    room = context * 4 * channels / target - min(tokens + tail, context) * token_bytes
    most = min(_up(int(dense / target), ALIGN), _up(max(int(room), 0) // -(-context // tokens) + 1, ALIGN))
    best: BlockLayout | None = None
    least = search.least
    for size in range(most, token_bytes - 1, -ALIGN):
        if search.fitting(size, search.page_record, search.record) < least:
            break  # nor will smaller blocks hold as many pages
        if _capacity(search.page, tokens, tail, token_bytes, size, context) < target:
            continue
        layout = search.largest(size, least)
        if layout is not None:
            best, least = layout, layout.other.pages + search.step
    return best


@dataclass(frozen=True)
class _Search:
    config: HiSparseConfig
    page: PageFormat
    row: PageFormat
    dtype: torch.dtype
    tokens: int
    head: int
    sketch_bits: int

    @property
    def step(self) -> int:
        """Pages are added so many at a time, so that the others fill whole rows."""
        return self.row.tokens // math.gcd(self.page.tokens, self.row.tokens)

    @cached_property
    def most(self) -> int:
        if self.config.evict == "none":
            return self.tokens // self.page.tokens
        return max(
            self.least, int(self.config.budget.max_keep * self.tokens) // self.page.tokens // self.step * self.step
        )

    @cached_property
    def least(self) -> int:
        wanted = math.ceil(self.config.budget.min_keep * self.tokens / self.page.tokens)
        return _up(max(wanted, 1), self.step)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V in the model's dtype."""
        return 2 * self.page.heads * self.page.head_dim * self.dtype.itemsize

    @property
    def page_record(self) -> int:
        """Bytes of a page in a block, at least."""
        return _up(self.page.page_bytes, ALIGN)

    @cached_property
    def record(self) -> int:
        """Bytes of a row's record; 0 where there are no rows."""
        if self.config.evict != "host":
            return 0
        sketch = self.row.tokens * self.row.heads * sketch_bytes(self.row.head_dim, self.sketch_bits)
        if self.config.selection.rows == "host":
            return _up(sketch, ALIGN)
        return _up(sketch, ALIGN) + self.row.page_bytes

    def rows(self, pages: int, head: int = 0) -> int:
        """Rows beside `pages` pages and a head of `head` tokens."""
        return (self.tokens - head - pages * self.page.tokens) // self.row.tokens if self.record else 0

    def fitting(self, size: int, page_stride: int, row_stride: int, head: int = 0, taken: int = 0) -> int:
        """The most pages that fit `size` bytes with the rows beside them, negative for none.

        head: tokens in the model's dtype; taken: pages whose place they take.
        """
        # A page more leaves fewer rows, in bytes times row.tokens:
        page = page_stride * self.row.tokens - row_stride * self.page.tokens
        room = (size - taken * page_stride) * self.row.tokens - (self.tokens - head) * row_stride
        if page > 0:
            return min(self.most, room // page // self.step * self.step)
        most = min(self.most, (self.tokens - head) // self.page.tokens // self.step * self.step)
        return most if most * page <= room else -1

    def at(self, size: int, pages: int) -> BlockLayout | None:
        """The layout of blocks of `size` bytes that keep `pages` pages; None where they do not fit."""
        record, token_bytes = self.record, self.token_bytes
        page_stride = _stride(size, self.page.page_bytes) if size >= self.page.page_bytes else 0
        row_stride = _stride(size, record) if 0 < record <= size else 0
        if not page_stride or bool(record) != bool(row_stride) or size < token_bytes:
            return None
        other = Counts(pages, self.rows(pages))
        if pages * page_stride + other.rows * row_stride > size:
            return None
        taken = -(-self.head * token_bytes // page_stride)
        full = (self.tokens - self.head) // self.page.tokens
        kept = min(pages, full // self.step * self.step, self.fitting(size, page_stride, row_stride, self.head, taken))
        first = Counts(kept, self.rows(kept, self.head))
        if kept < 0 or (self.config.evict == "none" and kept != full):
            return None
        if (taken + kept) * page_stride + first.rows * row_stride > size:
            return None
        return BlockLayout(
            self.tokens,
            self.config.tlif.prefix_length,
            self.page,
            self.row,
            self.dtype,
            self.sketch_bits,
            self.config.selection.rows == "device",
            size,
            page_stride,
            row_stride,
            first,
            other,
        )

    def largest(self, size: int, least: int) -> BlockLayout | None:
        """The layout of `size` bytes that keeps most pages, `least` or more."""
        if size < max(self.page.page_bytes, self.record):
            return None
        row_stride = _stride(size, self.record) if self.record else 0
        pages = self.fitting(size, _stride(size, self.page.page_bytes), row_stride)
        # Where the first block does not fit beside so many pages, it does not fit beside fewer.
        return self.at(size, pages) if pages >= least else None

    def smallest(self, pages: int) -> BlockLayout:
        """The smallest layout that keeps `pages` pages."""
        size = _up(pages * self.page.page_bytes + self.rows(pages) * self.record, ALIGN)
        while (layout := self.at(size, pages)) is None:
            size += ALIGN
        return layout
