"""What a layer stores: dense slots hold the very values, pages and rows hold them within half a step, by position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse.cache.geometry import Geometry
from hisparse.cache.layer import LayerStore
from hisparse.cache.pools import PageIds
from hisparse.cache.sequence import Sequence
from hisparse.config import HiSparseConfig
from hisparse.ops.sketch import build_sketch
from hisparse.ops.unpack import unpack_pages
from hisparse.vtq import ChannelStats, estimate_stats

CPU = torch.device("cpu")
HEADS, DIM = 2, 32


def by_parity(importance: np.ndarray) -> np.ndarray:
    return importance.astype(np.int64) * 2654435761 % 7 < 3


def store_of(stats: ChannelStats | None, dtype: torch.dtype = torch.float32, **config: Any) -> LayerStore:
    config = {"tlif": {"prefix_length": 8}, **config}
    geometry = Geometry(1, HEADS, DIM, dtype, HiSparseConfig(**config))
    return LayerStore(geometry, PageIds(), PageIds(), stats, torch.arange(DIM), CPU)


def sequence_of(store: LayerStore) -> Sequence:
    config = store.geometry.config
    return Sequence(
        store.page_ids, store.row_ids, config.vtq.page_tokens(), config.selection.row_size, config.tlif.prefix_length,
        config.evict,
    )  # fmt: skip


def fill(store: LayerStore, chunks: list[list[int]], seed: int = 0) -> list[tuple[Sequence, Tensor, Tensor, Tensor]]:
    """Feed sequences chunk by chunk, as the cache does: the commits of all rows first, then the layer's work."""
    make = torch.Generator().manual_seed(seed)
    batch = len(chunks)
    dtype = store.geometry.dtype
    sequences = [sequence_of(store) for _ in chunks]
    texts = [tuple(torch.randn(HEADS * g, sum(c), DIM, generator=make).to(dtype) for g in (3, 1, 1)) for c in chunks]
    for step in range(max(map(len, chunks))):
        work = []
        for row, (s, lengths) in enumerate(zip(sequences, chunks, strict=True)):
            if step < len(lengths) and lengths[step]:
                start, before = s.length, len(s.dense)
                commit = s.extend(np.arange(start, start + lengths[step], dtype=np.float32), by_parity)
                work.append((row, before, commit, slice(start, start + lengths[step])))
        for row, before, commit, here in work:
            q, k, v = (x[:, here] for x in texts[row])
            store.commit(q, k, v, row, batch, before, commit)
    return [(s, *text) for s, text in zip(sequences, texts, strict=True)]


def check(store: LayerStore, filled: list[tuple[Sequence, Tensor, Tensor, Tensor]]) -> None:
    stats = store.stats
    for row, (s, _, k, v) in enumerate(filled):
        dense, kept, aside = (torch.from_numpy(p) for p in s.positions())
        assert torch.equal(store.dense_k[row, :, : len(dense)], k[:, dense])
        assert torch.equal(store.dense_v[row, :, : len(dense)], v[:, dense])
        for at, ids, pool, fmt in (
            (kept, s.pages, store.kept, store.page_format),
            (aside, s.rows, store.rows, store.row_format),
        ):
            if not len(ids):
                continue
            new = unpack_pages(pool.read(torch.tensor(ids), CPU), stats, fmt, torch.float32)
            sides = ((), ()) if stats is None else ((stats.k_mean, stats.k_scale), (stats.v_mean, stats.v_scale))
            for old, found, bits, normal in zip((k, v), new, (fmt.k_bits, fmt.v_bits), sides, strict=True):
                want = old[:, at].transpose(0, 1).float()
                got = found.flatten(0, 1)
                if fmt.is_raw:
                    assert torch.equal(got, want)
                    continue
                # Half a step: the range of a block over its levels; the fast half of a split block has four bits.
                mean, scale = normal
                normalised = ((want - mean) / scale).unflatten(0, (-1, fmt.tokens)).unflatten(-1, (-1, fmt.head_dim))
                extent = normalised.amax((1, 3, 4)) - normalised.amin((1, 3, 4))  # [pages, H]
                levels = 15 if bits == 5 and store.geometry.config.vtq.split != "never" else 2**bits - 1
                bound = extent[:, None, :, None] / levels / 2 * scale * (1 + 2**-6) + 2e-2 * scale
                assert bool(((got - want).unflatten(0, (-1, fmt.tokens)).abs() <= bound).all())
        if len(s.rows):
            keys = k[:, aside].permute(1, 0, 2).unflatten(0, (-1, store.row_format.tokens))
            codes, scales = build_sketch(keys, stats, store.geometry.config.selection.sketch_bits)  # type: ignore[arg-type]
            ids = torch.tensor(s.rows)
            assert torch.equal(store.sketch_codes.data[ids], codes.flatten(1))
            assert torch.equal(store.sketch_scales.data[ids], scales.flatten(1))


CALIBRATED = estimate_stats(
    *torch.randn(2, 500, HEADS, DIM, generator=torch.Generator().manual_seed(9)), torch.arange(DIM)
)
chunk_lists = st.lists(st.lists(st.integers(0, 45), min_size=1, max_size=8), min_size=1, max_size=3).filter(
    lambda chunks: all(sum(c) for c in chunks)
)


@settings(max_examples=50, deadline=None)
@given(
    chunks=chunk_lists,
    page=st.sampled_from([1, 3, 8]),
    row=st.sampled_from([1, 4, 5]),
    raw=st.booleans(),
    evict=st.sampled_from(["host", "drop"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bits=st.sampled_from([4, 5, 6]),
    split=st.sampled_from(["rope", "peaks", "never"]),
    calibrated=st.booleans(),
)
def test_what_was_stored_reads_back_by_position(
    chunks: list[list[int]], page: int, row: int, raw: bool, evict: str, dtype: torch.dtype, bits: int, split: str,
    calibrated: bool,
) -> None:  # fmt: skip
    vtq = {"page_size": page, "enable_per_block_quant": not raw, "default_bit_width": bits, "split": split}
    store = store_of(CALIBRATED if calibrated else None, dtype, vtq=vtq, selection={"row_size": row}, evict=evict)
    check(store, fill(store, chunks))


def test_statistics_are_estimated_from_the_first_tokens_packed_and_kept() -> None:
    store = store_of(None)
    assert store.estimated
    ((_, q, k, v),) = fill(store, [[10, 3, 40, 40]])
    want = estimate_stats(  # the third chunk is the first after which a page is full: slots and chunk together
        k[:, :53].transpose(0, 1), v[:, :53].transpose(0, 1), torch.arange(DIM), q[:, 13:53].transpose(0, 1)
    )
    assert store.stats is not None
    for name in ("k_mean", "k_scale", "v_mean", "v_scale", "key_basis"):
        assert torch.equal(getattr(store.stats, name), getattr(want, name))
    assert not store_of(CALIBRATED).estimated


@pytest.mark.parametrize("rows", ["host", "device"])
def test_bytes_are_those_of_the_pools(rows: str) -> None:
    store = store_of(CALIBRATED, selection={"rows": rows, "row_size": 4, "sketch_bits": 2})
    assert sum(store.device_bytes().values()) == store.host_bytes() == 0
    fill(store, [[100, 30], [60]])
    sizes = store.device_bytes()
    assert sizes["dense"] == store.dense_k.untyped_storage().nbytes() + store.dense_v.untyped_storage().nbytes()
    assert sizes["kept"] == store.page_ids.capacity * store.page_format.page_bytes
    assert sizes["sketches"] == store.row_ids.capacity * 4 * HEADS * (DIM * 2 // 8 + 1)
    in_rows = store.row_ids.capacity * store.row_format.page_bytes
    assert (sizes.get("rows", 0), store.host_bytes()) == ((in_rows, 0) if rows == "device" else (0, in_rows))


def test_inputs_are_not_kept_alive() -> None:
    """Memory never holds the dense keys of a long chunk once they are packed."""
    store = store_of(CALIBRATED)
    fill(store, [[500]])
    for tensor in (store.dense_k, store.dense_v, store.kept.data, store.rows.data):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert store.dense_k.shape == (1, HEADS, store.geometry.slots, DIM)
