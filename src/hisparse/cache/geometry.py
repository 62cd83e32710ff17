"""The fixed sizes of one model's cache, and the arithmetic that turns a byte target into a number of kept tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparse.config import HiSparseConfig
from hisparse.ops.sketch import sketch_bytes
from hisparse.vtq.format import PageFormat

SINKS = 4


@dataclass(frozen=True)
class Geometry:
    """Sizes shared by every layer that HiSparse holds.

    layers: full-attention layers; heads: KV heads; dtype: the model's.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    config: HiSparseConfig

    @property
    def dense_token_bytes(self) -> int:
        """Bytes of one token in a dense bf16 cache, all layers."""
        return self.layers * self.heads * self.head_dim * 2 * 2

    @property
    def slots(self) -> int:
        """Dense slots of a sequence: sinks, tail, and tokens waiting for their page or row to fill up."""
        vtq, selection = self.config.vtq, self.config.selection
        return SINKS + self.config.tlif.prefix_length + vtq.page_size + selection.row_size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one dense slot, all layers."""
        return self.layers * self.heads * self.head_dim * 2 * self.dtype.itemsize

    @property
    def kept_format(self) -> PageFormat:
        return self._format(self.config.vtq.page_size)

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
        return size

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
