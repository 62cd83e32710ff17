"""Decode steps of the whole batch at once: the same attention as sequence by sequence, from tables, through the hot
buffer. On a CPU they run through the reference operations, and once through the kernels' interpreter."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hf_tools import PREFIX, Watcher, cache_for, greedy, left_padded, prompt, settings_of, tiny
from test_packed_cache import READS_EVERYTHING, talk
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import hisparse.cache.decode
import hisparse.cache.layer
import hisparse.integrations.transformers.cache as integration
from hisparse.cache.decode import BatchedDecode
from hisparse.config import HiSparseConfig
from hisparse.errors import FormatError
from hisparse.ops.decode import Pages
from hisparse.ops.scan import Chosen, reference, scan_and_select

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
FEW = {"min_tokens": 24, "root_factor": 0.0}


def always(device: torch.device, geometry: Any) -> bool:
    return True


@pytest.fixture
def batched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "batched", always)


def converse(model: Any, cache: Any, batch: int = 2, seed: int = 1, new: int = 60) -> Tensor:
    """Logits [B, T, V] of a prefill in pieces, steps, a question, and more steps."""
    ids = prompt(150 + new, batch, seed)
    with torch.no_grad():
        found = [
            model(piece, past_key_values=cache).logits
            for piece in ids.split([100, 40, *[1] * (new - 10), 10, *[1] * 10], 1)
        ]
    cache.check_integrity()
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", list(READS_EVERYTHING))
def test_attention_is_softmax_over_what_is_held(name: str, batched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, model = Watcher().install(monkeypatch), tiny()
    steps: list[int] = []
    original = BatchedDecode.attend
    monkeypatch.setattr(BatchedDecode, "attend", lambda *args: [steps.append(1), original(*args)][1])
    cache = cache_for(model, READS_EVERYTHING[name])
    talk(model, cache)
    assert watcher.compared == 190 * 2
    assert len(steps) == 3 * 2  # three single tokens in two layers


def test_attention_of_a_padded_batch(batched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, model = Watcher().install(monkeypatch), tiny()
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in (40, 130, 77)])
    cache = cache_for(model, settings_of(selection={"min_tokens": 4096}))
    greedy(model, ids, cache, 20, attention_mask=mask)
    assert watcher.compared == 2 * (40 + 130 + 77 + 3 * 19)
    cache.check_integrity()


SELECTIONS: dict[str, dict[str, Any]] = {
    "hot buffer": {},
    "no hot buffer": {"hot_factor": 0.0},
    "a hot buffer of one step": {"hot_factor": 1.0},
    "rows on the device": {"rows": "device"},
    "a scan every three steps, no hot buffer": {"scan_interval": 3, "hot_factor": 0.0},
    "a scan every two steps, rows on the device": {"scan_interval": 2, "rows": "device", "hot_factor": 1.0},
    "one bit, rows of eight": {"sketch_bits": 1, "row_size": 8},
    "two layers recall the same rows": {"share_layers": 2},
    "two layers recall the same rows, a scan every two steps": {
        "share_layers": 2,
        "scan_interval": 2,
        "hot_factor": 0.0,
    },
}


@pytest.mark.parametrize("name", list(SELECTIONS))
@pytest.mark.parametrize("batch", [1, 3])
def test_same_as_sequence_by_sequence(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings_of(selection={**FEW, **SELECTIONS[name]}, prefill={"recall_max_tokens": 4})
    found, reports = [], []
    for at_once in (False, True):
        monkeypatch.setattr(integration, "batched", lambda device, geometry, on=at_once: on)
        model = tiny()
        cache = cache_for(model, config)
        found.append(converse(model, cache, batch))
        reports.append(cache.report())
    assert torch.allclose(*found, atol=2e-3 * float(found[0].abs().max()))
    plain, ours = reports
    assert plain.tokens == ours.tokens
    counts = dict(ours.recall)
    hits, misses = counts.pop("hot_hits", 0), counts.pop("hot_misses", 0)
    assert counts == plain.recall
    hot = config.selection.rows == "host" and config.selection.hot_factor > 0
    assert (ours.device["hot"] > 1000) == (hot or config.selection.scan_interval > 1)
    if hot:
        # Steps were recalled through the buffer; the question's chunk reads all rows past it.
        assert 0 < misses < hits
        assert hits + misses <= counts["rows"]


def test_sequences_of_very_different_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in (3, 400, 60)])
    found = []
    for at_once in (False, True):
        monkeypatch.setattr(integration, "batched", lambda device, geometry, on=at_once: on)
        model = tiny()
        cache = cache_for(model, settings_of(selection=FEW))
        found.append(greedy(model, ids, cache, 40, attention_mask=mask))
        cache.check_integrity()
    assert torch.equal(*found)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_sketches_are_scanned_every_so_many_steps(
    at_once: bool, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "batched", lambda device, geometry: at_once)
    scans: list[int] = []
    module, name = (hisparse.cache.decode, "scan_and_select") if at_once else (hisparse.cache.layer, "select_rows")
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kw: [scans.append(1), original(*args, **kw)][1])
    model = tiny(num_hidden_layers=1)
    cache = cache_for(model, settings_of(selection={**FEW, "scan_interval": interval}))
    with torch.no_grad():
        model(prompt(150), past_key_values=cache)
        for step in range(9):
            model(prompt(1, seed=step), past_key_values=cache)
            assert len(scans) == step // interval + 1
        model(prompt(200, seed=3), past_key_values=cache)  # a longer chunk ends the run
        before = len(scans)
        model(prompt(1), past_key_values=cache)
        assert len(scans) == before + 1


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("share", "scans"), [(1, 5), (2, 3), (3, 2), (9, 1)])
def test_layers_share_the_rows_that_the_first_of_them_chose(
    at_once: bool, share: int, scans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "batched", lambda device, geometry: at_once)
    module, name = (hisparse.cache.decode, "scan_and_select") if at_once else (hisparse.cache.layer, "select_rows")
    seen: list[int] = []
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kw: [seen.append(1), original(*args, **kw)][1])
    model = tiny(num_hidden_layers=5)
    cache = cache_for(model, settings_of(selection={**FEW, "share_layers": share, "hot_factor": 0.0}))
    with torch.no_grad():
        model(prompt(150), past_key_values=cache)
        for step in range(3):
            seen.clear()
            model(prompt(1, seed=step), past_key_values=cache)
            assert len(seen) == scans
    report = cache.report()
    assert sum(report.device.values()) == report.gpu_bytes
    cache.check_integrity()


@pytest.mark.parametrize("hot_factor", [1.0, 2.0])
def test_between_scans_all_of_the_hot_buffer_is_recalled(
    hot_factor: float, batched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attended: list[Pages] = []
    original = hisparse.cache.decode.decode_attention

    def spy(*args: Any, **keywords: Any) -> Any:
        attended.append(args[5])
        return original(*args, **keywords)

    monkeypatch.setattr(hisparse.cache.decode, "decode_attention", spy)
    monkeypatch.setattr(hisparse.cache.decode, "UNCOUNTED", 2)
    model = tiny(num_hidden_layers=1)
    cache = cache_for(
        model, settings_of(selection={**FEW, "min_tokens": 400, "scan_interval": 3, "hot_factor": hot_factor})
    )

    def chosen(row: int) -> list[Tensor] | None:
        if not attended:
            return None
        decode, pages = cache.stores[0].decode, attended[-1]
        assert decode is not None
        assert decode.hot is not None
        rows = decode.hot.owner[pages.table[row, : int(pages.count[row])].long()].tolist()
        listed = cache.planners[row].sequence.rows
        return [torch.tensor([listed.index(r) for r in rows])]

    watcher = Watcher(chosen=chosen).install(monkeypatch)
    counts = []
    with torch.no_grad():
        model(prompt(1200, 2), past_key_values=cache)
        for step in range(12):
            model(prompt(1, 2, seed=step), past_key_values=cache)
            counts.append(attended[-1].count.tolist())
    assert watcher.compared == 2 * 1212
    slots = int(hot_factor * 100) if hot_factor > 1 else 128
    for step, pair in enumerate(counts):
        assert pair == [100, 100] if step % 3 == 0 else all(100 <= c <= slots for c in pair)
    assert max(counts[-1]) > 100
    cache.check_integrity()
    assert cache.report().recall["rows"] == sum(map(sum, counts))


def test_copies_go_their_own_way(batched: None) -> None:
    model = tiny()
    cache = cache_for(model, settings_of(selection=FEW))
    first = converse(model, cache, 1)
    for fork in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        a, b = (converse(model, c, 1, seed=5, new=20) for c in (fork, copy.deepcopy(cache)))
        assert torch.equal(a, b)
        fork.check_integrity()
    assert torch.equal(converse(model, cache, 1, seed=5, new=20), a)
    cache.reset()
    assert torch.equal(converse(model, cache, 1), first)


def test_bytes_reported_are_those_of_the_tensors_on_the_device(batched: None) -> None:
    model = tiny()
    config = settings_of(selection={**FEW, "scan_interval": 2})
    cache = cache_for(model, config)
    converse(model, cache, 2)
    report, store = cache.report(), cache.stores[1]
    assert store.decode is not None
    hot, tables = store.decode.hot, cache.shared.tables
    assert hot is not None
    parts = (hot.buffer, hot.owner, hot.stamp, hot.slot_of, hot.first, hot.clock, hot.counters)
    choices = (store.decode.chosen, store.decode.held)
    chosen = sum(x.nbytes for c in choices for x in ((c.rows, c.number) if c is choices[0] else (c.table, c.count)))
    assert report.device["hot"] == 2 * (
        sum(p.untyped_storage().nbytes() for p in parts) + chosen + store.decode.repeated.nbytes
    )
    assert report.device["tables"] == sum(
        t.untyped_storage().nbytes() for t in (tables.pages, tables.rows, tables.faults)
    )
    assert sum(report.device.values()) == report.gpu_bytes
    assert report.host_bytes == sum(s.rows.nbytes for s in cache.stores)


@pytest.mark.parametrize("capacity", [5.0, 6.5])
def test_hot_buffers_count_against_the_target(capacity: float, batched: None) -> None:
    model = tiny().to(torch.bfloat16)
    config = settings_of(
        budget={"capacity": capacity, "min_keep": 0.0, "max_keep": 1.0}, tlif={"threshold_base": 0.01},
        selection={"min_tokens": 64, "root_factor": 0.0},
    )  # fmt: skip
    cache = cache_for(model, config)
    with torch.no_grad():
        model(prompt(4000), past_key_values=cache)
        for step in range(40):
            model(prompt(1, seed=step), past_key_values=cache)
    report = cache.report()
    assert report.device["hot"] > 2 * 64 * cache.geometry.row_format.page_bytes
    assert capacity <= report.capacity < 1.1 * capacity
    cache.check_integrity()


def test_what_cannot_be_packed_is_reported_at_the_next_step(batched: None) -> None:
    model = tiny()
    cache = cache_for(model, settings_of())
    with torch.no_grad():
        model(prompt(80), past_key_values=cache)
        cache.shared.tables.faults += 3
        with pytest.raises(FormatError, match=r"3 blocks of keys or values .* held inf, NaN .* try bfloat16"):
            model(prompt(1), past_key_values=cache)


@pytest.mark.parametrize("batch", [1, 2])
def test_kernels_give_what_the_reference_gives(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels' own tests run on the GPU")
    found = []
    for backend in ("reference", "triton"):
        monkeypatch.setattr(integration, "batched", always)
        monkeypatch.setenv("HISPARSE_BACKEND", "reference")
        model = tiny(num_hidden_layers=1, head_dim=64)
        cache = cache_for(model, settings_of(selection=FEW))
        with torch.no_grad():
            model(prompt(60, batch), past_key_values=cache)
            monkeypatch.setenv("HISPARSE_BACKEND", backend)
            out = [model(prompt(1, batch, seed=i), past_key_values=cache).logits for i in range(5)]
        cache.check_integrity()
        found.append(torch.cat(out, 1))
    assert torch.allclose(*found, atol=5e-3 * float(found[0].abs().max()))


class Forced(LogitsProcessor):
    """Lets the tokens [B, n] be generated behind a prompt of so many tokens, whatever the logits."""

    def __init__(self, tokens: Tensor, prompt: int) -> None:
        self.tokens, self.prompt = tokens, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        one = self.tokens[:, input_ids.shape[1] - self.prompt, None].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, one, 0.0)


@pytest.mark.parametrize("rows", ["host", "device"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_batched_steps_give_the_logits_of_single_ones(rows: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random weights, tokens lie close to each other, and one row of six that is taken for another of nearly the
    same worth can move logits by their spread. So the tokens are given, logits are compared where both take the rows
    that the reference chooses, and the kernel's choice may differ from that in one row of fifty. (One of 31 codes that
    falls the other way moves logits by less than a hundredth.)"""
    config = HiSparseConfig(
        tlif={"scorer": "random", "prefix_length": PREFIX},
        selection={**FEW, "rows": rows},
        budget={"capacity": None},
        vtq={"page_size": 4},  # by default it is the device's: other pages, other logits
    )
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in (140, 230)])
    new = prompt(12, 2, seed=5)
    found: list[Tensor] = []
    taken: list[int] = []

    def choose(*args: Any) -> Chosen:
        chosen, expected = scan_and_select(*args), reference.scan_and_select(*args)
        numbers = expected.number.tolist()
        assert chosen.number.tolist() == numbers
        for ours, theirs, number in zip(chosen.rows.tolist(), expected.rows.tolist(), numbers, strict=True):
            taken.extend([len(set(ours[:number]) - set(theirs[:number])), number])
        return expected

    monkeypatch.setattr(hisparse.cache.decode, "scan_and_select", choose)
    for place in ("cpu", device):
        if found:
            monkeypatch.setattr(integration, "batched", always)
        model = tiny(head_dim=64).to(place)
        cache = cache_for(model, config)
        assert cache.geometry.batched == bool(found)
        out = model.generate(
            ids.to(place),
            past_key_values=cache,
            attention_mask=mask.to(place),
            max_new_tokens=12,
            do_sample=False,
            logits_processor=LogitsProcessorList([Forced(new, ids.shape[1])]),
            output_logits=True,
            return_dict_in_generate=True,
        )
        cache.check_integrity()
        assert torch.equal(out.sequences[:, ids.shape[1] :].cpu(), new)
        found.append(torch.stack(out.logits, 1).cpu())
    spread = float(found[0].std())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.02 * spread)
    assert sum(taken[1::2]) == 11 * 2 * 2 * 6  # steps, layers, sequences, rows
    assert sum(taken[::2]) <= sum(taken[1::2]) / 50
