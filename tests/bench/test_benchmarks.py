"""What the kernel benchmarks measure is right before it is timed: their data, oracles and files, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_a_step_that_cannot_be_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured: capacity 400 has no room for kept tokens."""
    monkeypatch.setattr(recall, "dense_decode_ms", lambda *_: 1.0)
    monkeypatch.setattr(recall, "_measure", lambda past, what, *_: {"hot": past.hot_rows, "what": what})
    said: list[str] = []
    rows = list(recall.run(SMALL, 8192, [400.0, 3.0], [2, 1], [4], CPU, 1.0, 1.0, said.append))
    assert [row["what"][:20] for row in rows] == ["capacity 3, 2-bit sk", "capacity 3, 1-bit sk"]
    assert all(row["hot"] > 0 for row in rows)
    assert len(said) == 2
    assert all("capacity 400" in line and "lower it" in line for line in said)


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
