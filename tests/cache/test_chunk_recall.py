"""A chunk in recall mode: one set of rows for all its queries, the best by their sketches; all where few."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hisparse.cache.geometry import Geometry
from hisparse.cache.layer import CHUNK_BUDGET, LayerStore
from hisparse.cache.pools import PageIds
from hisparse.cache.sequence import Sequence
from hisparse.config import HiSparseConfig
from hisparse.ops.attend import Packed, attend, select_for_chunk

CPU = torch.device("cpu")
HEADS, DIM, PAST, CHUNK = 2, 32, 400, 20


def filled(most: int = CHUNK - 1, **selection: Any) -> tuple[LayerStore, Sequence, tuple[torch.Tensor, ...]]:
    """A layer that holds PAST tokens, a fifth of them kept; queries, keys and values of a chunk."""
    config = HiSparseConfig(
        tlif={"prefix_length": 8},
        prefill={"mode": "recall", "recall_max_tokens": most},
        selection={"root_factor": 0.0, **selection},
    )
    geometry = Geometry(1, HEADS, DIM, torch.float32, config)
    store = LayerStore(geometry, PageIds(), PageIds(), None, torch.arange(DIM), CPU)
    sequence = Sequence(store.page_ids, store.row_ids, config.vtq.page_tokens(), config.selection.row_size, 8, "host")
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(h, PAST + CHUNK, DIM, generator=make) for h in (2 * HEADS, HEADS, HEADS))
    commit = sequence.extend(np.arange(PAST, dtype=np.float32), lambda importance: importance % 5 == 0)
    store.commit(q[:, :PAST], k[:, :PAST], v[:, :PAST], 0, 1, 0, commit)
    return store, sequence, tuple(x[:, PAST:] for x in (q, k, v))


@pytest.mark.parametrize("tokens", [8, 40, 10_000])
@pytest.mark.parametrize("most", [CHUNK - 1, CHUNK], ids=["long", "short"])
def test_a_chunk_attends_to_kept_tokens_and_the_rows_chosen_for_it(tokens: int, most: int) -> None:
    store, sequence, (q, k, v) = filled(most, min_tokens=tokens)
    view = sequence.view(CPU)
    found = store.attend(q, k, v, 0, view, 0.3)
    every = torch.tensor(sequence.rows)
    codes = store.sketch_codes.data[every].view(len(every), HEADS, store.row_format.tokens, -1)
    scales = store.sketch_scales.data[every].view(codes.shape[:3])
    assert store.stats is not None
    count = min(CHUNK_BUDGET * tokens // store.row_format.tokens, len(every))
    chosen = every[select_for_chunk(q, codes, scales, store.stats, 0.3, count)]
    packed = [
        Packed(store.kept.read(torch.tensor(sequence.pages), CPU), store.page_format),
        Packed(store.rows.read(chosen, CPU), store.row_format),
    ]
    slots = len(sequence.dense)
    dense = (x[0, :, :slots] for x in (store.dense_k, store.dense_v))
    want = attend(q, k, v, *dense, packed, store.stats, 0.3)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    assert store.recalled.rows == count
    assert (store.recalled.steps, store.recalled.chunks) == (0, 1)
