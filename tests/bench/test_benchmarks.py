"""What the kernel benchmarks measure is right before it is timed: their data, oracles and files, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hisparse.bench import decode, recall
from hisparse.bench.data import float64_attention, make_layer
from hisparse.bench.measure import WrongResult, check, relative
from hisparse.bench.past import Past
from hisparse.bench.prefill import error_of
from hisparse.bench.results import make_row, save
from hisparse.bench.shapes import SHAPES, shape_of
from hisparse.cli.bench import bench_app
from hisparse.errors import InputError, UnsupportedError
from hisparse.ops.attend import attend
from hisparse.ops.decode import reference
from hisparse.vtq.format import PageFormat

CPU = torch.device("cpu")
SMALL = "qwen2.5-0.5b"


def test_a_wrong_result_has_no_speed() -> None:
    assert check("x", 1e-3, 1e-2) == 1e-3
    for error in (2e-2, float("nan")):
        with pytest.raises(WrongResult, match="no speed is given"):
            check("x", error, 1e-2)


def test_the_oracle_is_softmax_over_all_slices() -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 16, generator=make, dtype=torch.float64) for n in (3, 50, 50))
    cut = [(k[:, a:b], v[:, a:b]) for a, b in ((0, 1), (1, 20), (20, 50))]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3)
    torch.testing.assert_close(float64_attention(q, cut, 0.3), want)


def test_a_layer_has_offset_channels_and_packs_to_what_it_is() -> None:
    shape = SHAPES[SMALL]
    layer = make_layer(shape, 1024, CPU)
    fmt = PageFormat(4, shape.heads, shape.dim, 5, 5, 64)
    pages = layer.pack(fmt, 64, 512)
    assert pages.shape == (128, fmt.page_bytes)
    mean, spread = layer.k.float().mean(1), layer.k.float().std(1)
    assert float((mean.abs() / spread).max()) > 3


@pytest.mark.parametrize("scattered", [False, True])
def test_attention_over_a_past_agrees_with_the_benchmarks_oracle(scattered: bool) -> None:
    layer = make_layer(SHAPES[SMALL], 2112, CPU)
    past = Past(SMALL, layer, 2048, 4.0, scattered)
    q = torch.randn(14, 64, 64).to(torch.bfloat16)
    k, v = layer.k[:, 2048:], layer.v[:, 2048:]
    for packed in (past.everything(), past.chosen(torch.tensor([5, 0, 17]))):
        out = attend(q, k, v, past.dense_k, past.dense_v, packed, layer.stats, past.scaling)
        assert error_of(past, packed, q, k, v, out) < 1.2e-2
    tokens = past.kept.count * past.kept_format.tokens + past.rows * past.row_format.tokens
    assert tokens <= 2048 - past.dense_k.shape[1]


def test_a_step_with_recall_agrees_with_its_oracle_and_drifts_as_told() -> None:
    past = Past(SMALL, make_layer(SHAPES[SMALL], 8192, CPU), 8192, 5.0, True)
    steps = recall.Steps(past)
    assert max(steps.error(i) for i in range(2)) < recall.TOLERANCE
    assert abs(steps.repeats(6) - recall.REPEATS) < 0.1
    assert steps.repeats(2, 16) > steps.repeats(6)
    found, missed = steps.hot.counters[0].tolist()
    assert found + missed == 2 * past.budget
    assert missed >= past.budget


def test_steps_between_scans_recall_what_the_hot_buffer_holds() -> None:
    """Every third step scans; a row less in the books, or another one's bytes in a slot, and the oracle sees it."""
    past = Past(SMALL, make_layer(SHAPES[SMALL], 8192, CPU), 8192, 5.0, True)
    steps = recall.Steps(past, drift=0.5)
    scanning = [steps.scans(recall.WARM + i, 3) for i in range(7)]
    assert scanning == [True, False, False, True, False, False, True]
    held = []
    for i in range(5):
        assert steps.error(recall.WARM + i, 3) < recall.TOLERANCE
        held.append(len(steps.recalled(recall.WARM + i, 3)))
    assert held[0] == held[3] == past.budget
    assert past.budget == held[1] == held[2] < held[4] <= past.hot_rows
    assert int(steps.hot.counters.sum()) == 2 * past.budget  # nothing is fetched in between
    index = recall.WARM + 4
    found = steps.step(index, 3)
    assert steps.error(index, 3, found) < recall.TOLERANCE
    slots = (steps.hot.owner >= 0).nonzero().flatten()
    steps.hot.owner[slots[: len(slots) // 2]] = -1
    assert steps.error(index, 3, found) > recall.TOLERANCE
    steps.hot.buffer[slots[-200:]] = steps.hot.buffer[slots[:200]].clone()
    steps.held = None
    assert steps.error(index, 3) > recall.TOLERANCE


def test_a_step_that_cannot_be_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured: capacity 400 has no room for kept tokens."""
    monkeypatch.setattr(recall, "dense_decode_ms", lambda *_: 1.0)
    monkeypatch.setattr(recall, "_measure", lambda past, what, *_: [{"hot": past.hot_rows, "what": what}])
    said: list[str] = []
    rows = list(recall.run(SMALL, 8192, [400.0, 3.0], [2, 1], [4], [1], CPU, 1.0, 1.0, said.append))
    assert [row["what"][:20] for row in rows] == ["capacity 3, 2-bit sk", "capacity 3, 1-bit sk"]
    assert all(row["hot"] > 0 for row in rows)
    assert len(said) == 2
    assert all("capacity 400" in line and "lower it" in line for line in said)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Past:
    """A past whose steps are taken one by one instead of by graphs, with made-up times."""

    def replay(layers: Any, counters: Any = ()) -> tuple[float, torch.Tensor | None, list[Any]]:
        before = [x.clone() for x in counters]
        for index in range(recall.WARM, recall.WARM + recall.STEPS):
            last = [layer(index) for layer in layers]
        return 0.5, sum((x - y for x, y in zip(counters, before, strict=True)), torch.zeros(1, 2)), last

    monkeypatch.setattr(recall, "replay_ms", replay)
    monkeypatch.setattr(recall, "graph_ms", lambda calls: 0.25)
    monkeypatch.setattr(recall, "STEPS", 24)
    monkeypatch.setattr(recall, "WARM", 2)
    return Past(SMALL, make_layer(SHAPES[SMALL], 4096, CPU), 4096, 3.0, True)


def test_a_row_for_each_scan_interval(measured: Past) -> None:
    one, two = recall._measure(measured, "what", [1, 2], 1.0, 1e9, 1e9)
    assert (one["scan_interval"], two["scan_interval"]) == (1, 2)
    assert (one["what"], two["what"]) == ("what", "what, a scan every 2 steps")
    assert one["ms"] == two["ms"] == 0.5
    assert one["speedup"] == 2
    assert max(one["error"], two["error"]) < recall.TOLERANCE
    assert "scan_select_ms" in one
    assert measured.budget <= two["held_rows"] <= measured.hot_rows


def test_steps_between_scans_that_are_wrong_have_no_speed(measured: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    right = recall.Steps.attend
    monkeypatch.setattr(recall.Steps, "attend", lambda self, q, pages: 1.02 * right(self, q, pages))
    rows = recall._measure(measured, "what", [1, 2], 1.0, 1e9, 1e9)
    next(rows)
    with pytest.raises(WrongResult, match="a scan every 2 steps"):
        next(rows)


def test_scan_intervals_that_do_not_divide_the_steps_are_refused() -> None:
    with pytest.raises(InputError, match=r"--scan-interval 5 .* use one of 1, 2, 3, 4, 6"):
        next(recall.run(SMALL, 4096, [3.0], [2], [4], [1, 5], CPU, 1.0, 1.0, print))


def test_decode_over_shuffled_pages_agrees_with_its_oracle() -> None:
    shape = SHAPES[SMALL]
    case = decode.Case(make_layer(shape, 2048, CPU), PageFormat(8, shape.heads, shape.dim, 5, 5, 64), 1024)
    for first in (0, 1024):
        pages = case.pages(first)
        want = case.exact(pages)
        found = case.attend(reference, pages).double()
        assert float(((found - want).norm(dim=-1) / want.norm(dim=-1)).max()) < decode.TOLERANCE


def test_a_capacity_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(InputError, match="capacity 400"):
        Past(SMALL, make_layer(SHAPES[SMALL], 2048, CPU), 2048, 400.0, False)


def test_results_are_merged_and_say_where_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "results" / "card.json"
    save([make_row("a", SMALL, 1, 2.0, dense_ms=4.0), make_row("b", SMALL, 1, 2.0)], path, "one", read_bandwidth=7.0)
    save([make_row("a", SMALL, 1, 3.0, error=0.001234)], path, "two")
    data = json.loads(path.read_text())
    assert data["commit"] == "two"
    assert data["read_bandwidth"] == 7
    assert [(row["bench"], row["ms"], row.get("commit")) for row in data["rows"]] == [
        ("b", 2.0, "one"),
        ("a", 3.0, None),
    ]
    assert data["rows"][1]["error"] == 1.23e-3
    fields = {"bench", "shape", "context", "batch", "capacity", "ms", "dense_ms", "speedup", "bytes", "error"}
    assert fields <= set(data["rows"][0])
    path.write_text("[]")
    with pytest.raises(InputError, match="no results file"):
        save([make_row("a", SMALL, 1, 3.0)], path, "two")


def test_unknown_shapes_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="glm4-9b-1m"):
        shape_of("glm")


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
@pytest.mark.parametrize("name", ["decode", "prefill", "recall", "sketch", "pack"])
def test_without_a_gpu_the_remedy_is_named(name: str) -> None:
    result = CliRunner().invoke(bench_app, [name])
    assert isinstance(result.exception, UnsupportedError)
    assert "machine with an NVIDIA GPU" in str(result.exception)


@pytest.mark.parametrize("name", ["plan", "tlif"])
def test_planning_and_scoring_are_measured_on_a_cpu_too(name: str, tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    result = CliRunner().invoke(bench_app, [name, "-s", SMALL, "-c", "2048", "-o", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["bench"] for row in rows} == {name}
    assert all(row["ms"] > 0 for row in rows)


def test_relative_error_keeps_nan() -> None:
    assert relative(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])) == 0
    assert relative(torch.tensor([float("nan")]), torch.tensor([1.0])) != relative(torch.ones(1), torch.ones(1))
