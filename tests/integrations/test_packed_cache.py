"""The packed cache: its attention against float64 over what the pools hold, its combinations, its bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hf_tools import MODELS, PREFIX, Watcher, cache_for, dense, greedy, left_padded, prompt, settings_of, tiny
from torch import Tensor

import hisparse.cache.layer
from hisparse.cache.layer import LayerStore
from hisparse.config import HiSparseConfig

ALL_ROWS = {"min_tokens": 4096}
READS_EVERYTHING = {
    "all rows in the budget": settings_of(selection=ALL_ROWS),
    "rows on the device": settings_of(selection={**ALL_ROWS, "rows": "device"}),
    "nothing set aside": settings_of(evict="none"),
    "set aside and dropped": settings_of(evict="drop"),
    "nothing packed": settings_of(vtq={"enable_per_block_quant": False}, selection=ALL_ROWS),
    "4 and 6 bits": settings_of(vtq={"default_bit_width": 4, "value_bit_width": 6}, selection=ALL_ROWS),
    "ugly sizes": settings_of(vtq={"page_size": 5}, selection={**ALL_ROWS, "row_size": 3}, tlif={"prefix_length": 7}),
}


def talk(model: Any, cache: Any) -> None:
    """Prefill in pieces, a short question, and single steps."""
    with torch.no_grad():
        for piece in prompt(190, seed=1).split([100, 60, 9, 1, 1, 1, 12, 6], 1):
            model(piece, past_key_values=cache)
    cache.check_integrity()


@pytest.mark.parametrize("name", list(READS_EVERYTHING))
def test_attention_is_softmax_over_what_is_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, model = Watcher().install(monkeypatch), tiny()
    cache = cache_for(model, READS_EVERYTHING[name])
    talk(model, cache)
    assert watcher.compared == 190 * 2
    tokens = cache.report().tokens
    assert tokens["kept"] > 0
    assert (tokens["set_aside"] > 0) == (cache.config.evict == "host")
    assert (tokens["dropped"] > 0) == (cache.config.evict == "drop")


@pytest.mark.parametrize("kind", list(MODELS))
def test_attention_in_every_architecture(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, model = Watcher().install(monkeypatch), tiny(kind)
    talk(model, cache_for(model, settings_of(selection=ALL_ROWS)))
    held = [
        i for i, t in enumerate(getattr(model.config, "layer_types", None) or ["full_attention"] * 2) if t[0] == "f"
    ]
    assert {layer for layer, _ in watcher.record} == set(held)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_attention_of_query_groups_and_wide_heads(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(num_attention_heads=groups, num_key_value_heads=1, head_dim=64)
    Watcher().install(monkeypatch)
    talk(model, cache_for(model, settings_of(selection=ALL_ROWS)))


def test_attention_of_a_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, model = Watcher().install(monkeypatch), tiny()
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in (40, 130, 77)])
    cache = cache_for(model, settings_of(selection=ALL_ROWS))
    greedy(model, ids, cache, 20, attention_mask=mask)
    assert watcher.compared == 2 * (40 + 130 + 77 + 3 * 19)


def long_prefill_recalls(**selection: Any) -> HiSparseConfig:
    selection = {"min_tokens": 12, "root_factor": 0.0, **selection}
    return settings_of(selection=selection, prefill={"mode": "recall", "choose": "token"})


@pytest.mark.parametrize(
    "config",
    [
        long_prefill_recalls(),
        long_prefill_recalls(sketch_bits=1, rows="device"),
        long_prefill_recalls(row_size=5),
        settings_of(
            selection={"min_tokens": 12, "root_factor": 0.0}, prefill={"recall_max_tokens": 10, "choose": "token"}
        ),
    ],
    ids=["recall", "one bit on the device", "rows of five", "full prefill, short questions recall"],
)
def test_each_query_attends_to_the_rows_chosen_for_it(config: HiSparseConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[int, list[Tensor]] = {}  # by batch row, of the layer at work
    original, original_attend = hisparse.cache.layer.select_rows, LayerStore.attend

    def spy(scores: Tensor, row_size: int, count: int) -> Tensor:
        chosen[next(reversed(chosen))].append(original(scores, row_size, count))
        return chosen[next(reversed(chosen))][-1]

    def attend(store: LayerStore, *args: Any) -> Tensor:
        if args[3] == 0:
            chosen.clear()
        chosen[args[3]] = []
        return original_attend(store, *args)

    monkeypatch.setattr(hisparse.cache.layer, "select_rows", spy)
    monkeypatch.setattr(LayerStore, "attend", attend)
    watcher = Watcher(chosen=lambda row: chosen.get(row) or None).install(monkeypatch)
    model, row = tiny(), config.selection.row_size
    for batch in (1, 3):  # the pages of several sequences lie among each other
        watcher.record.clear()
        cache = cache_for(model, config)
        with torch.no_grad():
            for piece in prompt(190, batch, seed=1).split([100, 60, 9, 1, 1, 1, 12, 6], 1):
                model(piece, past_key_values=cache)
        cache.check_integrity()
        recall = cache.report().recall
        assert recall["rows"] > 0
        assert recall["tokens"] == recall["rows"] * row
        assert recall["bytes"] == recall["rows"] * cache.geometry.row_format.page_bytes
        assert len(chosen) == batch
        for choices in chosen.values():
            assert len(choices) == 6  # one set for each token of the last piece
            assert all(len(set(c.tolist())) == len(c) == -(-12 // row) for c in choices)


def test_a_budget_that_covers_all_rows_recalls_what_full_prefill_reads() -> None:
    model, outputs = tiny(), {}
    for mode, few in (("full", 4096), ("recall", 4096), ("full", 12), ("recall", 12)):
        config = settings_of(selection={"min_tokens": few, "root_factor": 0.0}, prefill={"mode": mode})
        cache = cache_for(model, config)
        with torch.no_grad():
            pieces = [model(p, past_key_values=cache).logits for p in prompt(200, seed=2).split([90, 80, 20, 10], 1)]
        outputs[mode, few] = torch.cat(pieces, 1)
    assert torch.equal(outputs["recall", 4096], outputs["full", 4096])
    assert not torch.allclose(outputs["recall", 12], outputs["recall", 4096], atol=1e-2)


def test_packing_changes_the_answer_a_little_and_more_bits_less() -> None:
    model, ids = tiny(), prompt(200, seed=3)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = model(ids).logits[0, 100:].log_softmax(-1)
    model.set_attn_implementation("hisparse")
    divergence = []
    for bits in (4, 5, 6):
        cache = cache_for(model, settings_of(vtq={"default_bit_width": bits, "split": "never"}, evict="none"))
        with torch.no_grad():
            found = [model(p, past_key_values=cache).logits for p in ids.split([100, *[10] * 10], 1)]
        got = torch.cat(found[1:], 1)[0].log_softmax(-1)
        divergence.append(float((want.exp() * (want - got)).sum(-1).mean()))
    assert divergence[0] > divergence[1] > divergence[2] > 1e-6


COMBINATIONS = list(
    itertools.product(
        ("host", "drop", "none"), ("host", "device"), (1, 2), ((4, None), (5, 4), (6, 5)), ("rope", "peaks", "never"),
        ("full", "recall"),
    )
)  # fmt: skip


@pytest.mark.parametrize("evict", ["host", "drop", "none"])
@pytest.mark.parametrize("mode", ["full", "recall"])
def test_every_combination_runs_or_is_refused(evict: str, mode: str) -> None:
    model, ids = tiny(num_hidden_layers=1), prompt(90)
    for other in [c for c in COMBINATIONS if (c[0], c[5]) == (evict, mode)]:
        _, rows, sketch, (k_bits, v_bits), split, _ = other
        sections: dict[str, Any] = {
            "evict": evict,
            "selection": {"rows": rows, "sketch_bits": sketch, "min_tokens": 8, "root_factor": 0.0},
            "vtq": {"default_bit_width": k_bits, "value_bit_width": v_bits, "split": split},
            "prefill": {"mode": mode},
        }
        if (evict, mode) == ("drop", "recall"):
            with pytest.raises(Exception, match=r'evict = "drop" leaves nothing to recall.*use evict = "host"'):
                settings_of(**sections)
            continue
        cache = cache_for(model, settings_of(**sections))
        out = greedy(model, ids, cache, 6, prefill_chunk_size=50)
        assert out.shape == (1, 96), other
        cache.check_integrity()
        report = cache.report()
        assert report.tokens["total"] == 95, other
        assert (report.host_bytes > 0) == (evict == "host" and rows == "host"), other
        assert ("rows" in report.device) == (rows == "device"), other
        assert (report.recall["rows"] > 0) == (evict == "host"), other


def tensors_of(thing: Any, seen: dict[int, Tensor], visited: set[int], skip: tuple[type, ...]) -> dict[int, Tensor]:
    """Every tensor storage reachable from `thing`, by address."""
    if id(thing) in visited or isinstance(thing, (str, bytes, int, float, type, torch.device, torch.dtype, *skip)):
        return seen
    visited.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.numel():
            seen[thing.untyped_storage().data_ptr()] = thing
    elif isinstance(thing, dict):
        for value in thing.values():
            tensors_of(value, seen, visited, skip)
    elif isinstance(thing, (list, tuple, set)):
        for value in thing:
            tensors_of(value, seen, visited, skip)
    elif hasattr(thing, "__dict__"):
        tensors_of(vars(thing), seen, visited, skip)
    return seen


@pytest.mark.parametrize("rows", ["host", "device"])
@pytest.mark.parametrize("scorer", ["random", "novelty"])
def test_reported_bytes_are_those_of_the_tensors_held(rows: str, scorer: str) -> None:
    from hisparse.cache.sequence import View
    from hisparse.vtq import ChannelStats

    model = tiny()
    cache = cache_for(model, settings_of(selection={"rows": rows}, tlif={"scorer": scorer}))
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in (150, 90)])
    greedy(model, ids, cache, 30, attention_mask=mask)
    report = cache.report()
    # The views of the last step are built anew for each step; orders and statistics belong to the model.
    held = tensors_of(cache, {}, set(), (ChannelStats, View))
    for layer in cache.layers:
        held.pop(layer.order.untyped_storage().data_ptr(), None)
    found = sum(t.untyped_storage().nbytes() for t in held.values())
    tables = report.device["tables"]  # kept as lists on the CPU; counted as the int32 tables that a GPU holds
    assert tables == sum(
        4 * (len(p.sequence.pages) + len(p.sequence.rows) + len(p.sequence.positions()[1])) for p in cache.planners
    )
    assert found == report.gpu_bytes - tables + report.host_bytes
    assert report.gpu_bytes == sum(report.device.values())
    assert report.dense_bytes == (150 + 90 + 2 * 29) * 2 * 2 * 16 * 2 * 2
    assert report.capacity == report.dense_bytes / report.gpu_bytes
    assert report.model_bytes == sum(store.stats.nbytes for store in cache.stores if store.stats)
    line = next(line for line in cache.check_integrity().splitlines() if line.startswith("device: "))
    assert line.endswith(f" = {report.gpu_bytes} bytes")


@pytest.mark.parametrize("pieces", [[700], [256] * 4 + [1] * 20, [97] * 8])
@pytest.mark.parametrize("capacity", [5.0, 6.5])
@pytest.mark.parametrize("evict", ["host", "drop"])
def test_the_target_is_met_where_it_can_be(pieces: list[int], capacity: float, evict: str) -> None:
    model = tiny().to(torch.bfloat16)
    config = settings_of(
        evict=evict, budget={"capacity": capacity, "min_keep": 0.0, "max_keep": 1.0}, tlif={"threshold_base": 0.01}
    )
    cache = cache_for(model, config)
    with torch.no_grad():
        for i, piece in enumerate(pieces):
            model(prompt(piece, seed=i), past_key_values=cache)
    report = cache.report()
    assert report.capacity >= capacity
    # The bytes are used, but for the spare pages that were reckoned with: much, in a cache of a few kilobytes.
    assert report.capacity < 1.3 * capacity
    cache.check_integrity()


def test_integrity_notices_lost_pages() -> None:
    model = tiny()
    for damage in ("owned", "pool"):
        cache = cache_for(model, settings_of())
        greedy(model, prompt(120), cache)
        if damage == "owned":
            cache.shared.page_ids.take(1)
        else:
            cache.stores[1].rows.data = cache.stores[1].rows.data[:-1]
        with pytest.raises(AssertionError, match="does not add up" if damage == "owned" else "layer 1: rows pool has"):
            cache.check_integrity()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_models(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny().to(dtype)
    Watcher(tolerance=2e-2 if dtype == torch.bfloat16 else 3e-3).install(monkeypatch)
    cache = cache_for(model, settings_of(selection=ALL_ROWS))
    talk(model, cache)
    assert cache.stores[0].dense_k.dtype == dtype


def test_a_prompt_within_the_tail_is_exact() -> None:
    model, ids = tiny(), prompt(PREFIX)
    assert torch.equal(greedy(model, ids, cache_for(model, settings_of()), 4), dense(model, ids, 4))
