"""The fixed sizes of one model's cache, and the arithmetic that turns a byte target into a number of kept tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparse.config import HiSparseConfig
from hisparse.ops.sketch import sketch_bytes
from hisparse.vtq.format import PageFormat

SINKS = 4
HOT_SHARE = 0.5
"""Most of the device bytes left beside dense slots and sketches that go to hot buffers; the rest is for kept tokens."""


def rounded(rows: int) -> int:
    """Room for `rows` rows or more: a multiple of 64, so that shapes change seldom from step to step."""
    return -(-rows // 64) * 64


def spare_entries(entries: int) -> int:
    """Entries that a table on the device may have beyond `entries`, which are in use: it grows by an eighth."""
    return rounded(entries + entries // 8) - entries


@dataclass(frozen=True)
class Geometry:
    """Sizes shared by every layer that HiSparse holds.

    layers: full-attention layers; heads: KV heads; dtype: the model's; batched: decode steps run for the whole batch at
    once, with tables and hot buffers on the device.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    config: HiSparseConfig
    batched: bool = False

    @property
    def hot(self) -> bool:
        """True where rows on the host are read through a hot buffer."""
        selection = self.config.selection
        return self.batched and self.config.evict == "host" and selection.rows == "host" and selection.hot_factor > 0

    @property
    def dense_token_bytes(self) -> int:
        """Bytes of one token in a dense bf16 cache, all layers."""
        return self.layers * self.heads * self.head_dim * 2 * 2

    @property
    def slots(self) -> int:
        """Dense slots of a sequence: sinks, tail, and tokens waiting for their page or row to fill up."""
        vtq, selection = self.config.vtq, self.config.selection
        return SINKS + self.config.tlif.prefix_length + vtq.page_tokens() + selection.row_size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one dense slot, all layers."""
        return self.layers * self.heads * self.head_dim * 2 * self.dtype.itemsize

    @property
    def kept_format(self) -> PageFormat:
        return self._format(self.config.vtq.page_tokens())

    @property
    def row_format(self) -> PageFormat:
        return self._format(self.config.selection.row_size)

    def _format(self, tokens: int) -> PageFormat:
        if self.config.vtq.enable_per_block_quant:
            return PageFormat.vtq(self.config.vtq, self.heads, self.head_dim, tokens)
        return PageFormat.raw(self.dtype, self.heads, self.head_dim, tokens)

    @property
    def kept_token_bytes(self) -> float:
        """Device bytes of one kept token: its share of a page in every layer, and its entry in the tables."""
        page = self.kept_format
        return self.layers * page.page_bytes / page.tokens + 4 / page.tokens + 4

    @property
    def aside_token_bytes(self) -> float:
        """Device bytes of one token set aside: its sketch in every layer, and its row where rows lie on the device."""
        if self.config.evict != "host":
            return 0.0
        selection, row = self.config.selection, self.row_format
        size = self.layers * self.heads * sketch_bytes(self.head_dim, selection.sketch_bits) + 4 / row.tokens
        if selection.rows == "device":
            size += self.layers * row.page_bytes / row.tokens
        if self.hot:
            size += self.layers * 4 / row.tokens
        return size

    @property
    def hot_row_bytes(self) -> int:
        """Device bytes of one slot of the hot buffers, all layers: the row, its owner and its stamp."""
        return self.layers * (self.row_format.page_bytes + 8)

    def hot_rows(self, context: int, graduated: int, overhead: int) -> int:
        """Slots for one sequence in a layer's hot buffer; 0 where what one step recalls does not fit.

        `selection.hot_factor` times what a step recalls, but no more than there are rows, nor more than HOT_SHARE of
        what the byte target leaves. Arguments as in `keep_limit`.
        """
        if not self.hot:
            return 0
        selection = self.config.selection
        every = graduated // selection.row_size
        wanted = min(-(-selection.budget(context) // selection.row_size), every)
        target = max(min(int(selection.hot_factor * wanted), every), rounded(wanted))
        if self.config.budget.capacity is None or not target:
            return target
        spare = context * self.dense_token_bytes / self.config.budget.capacity
        spare -= overhead + graduated * self.aside_token_bytes
        fits = int(HOT_SHARE * spare / self.hot_row_bytes)
        return min(target, fits) if fits >= rounded(wanted) else 0

    def keep_limit(self, context: int, graduated: int, overhead: int) -> int:
        """How many of `graduated` tokens may be kept at a context of `context` tokens.

        `overhead`: device bytes of the sequence that are neither kept tokens nor sketches. Between `budget.min_keep`
        and `budget.max_keep` of the tokens, whatever the byte target asks for.
        """
        budget = self.config.budget
        highest = int(budget.max_keep * graduated)
        if budget.capacity is None:
            return highest
        allowed = context * self.dense_token_bytes / budget.capacity
        spare = allowed - overhead - graduated * self.aside_token_bytes
        extra = self.kept_token_bytes - self.aside_token_bytes
        # Rows on the device may cost more than kept pages: then every token kept saves bytes.
        affordable = int(spare / extra) if extra > 0 else highest
        return max(int(budget.min_keep * graduated), min(affordable, highest))
