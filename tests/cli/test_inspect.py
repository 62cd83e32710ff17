"""`hisparse inspect-kv-cache`: its tables agree with the cache's own report, and with a count by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.cli import inspect


def test_tiers_and_tokens_add_up(cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path) -> None:
    out, png = tmp_path / "x.json", tmp_path / "plan.png"
    arguments = ("-m", tiny_directory, "-f", text_file, "--json", out, "--png", png, "--check", "--device", "cpu")
    code, stdout, err = cli("inspect-kv-cache", *arguments)
    assert code == 0, err
    data = json.loads(out.read_text())
    layers = data["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1]
    device = sum(count for layer in layers for name, count in layer.items() if name not in ("layer", "host"))
    assert device + sum(data["shared"].values()) == data["gpu_bytes"]
    assert sum(layer["host"] for layer in layers) == data["host_bytes"]
    assert data["tokens"]["total"] == 600
    # the dense sinks (4) and tail (128) are in no block
    assert sum(row["tokens"] for row in data["blocks"]) == 600 - 4 - 128
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "set aside" in stdout
    assert "600 tokens = " in stdout


def test_a_text_that_is_all_tail_has_no_plan_to_draw(cli: Any, tmp_path: Path, tiny_directory: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("only a few words")
    code, _, err = cli("inspect-kv-cache", "-m", tiny_directory, "-f", path, "--png", tmp_path / "p.png")
    assert code == 2
    assert "longer" in err
    code, _, err = cli("inspect-kv-cache", "-m", tiny_directory, "-f", path)
    assert code == 0, err


BLOCKS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 32), st.floats(0, 1)), max_size=40)


@given(st.lists(BLOCKS, max_size=3))
def test_density_by_length_is_a_count(plans: list[list[tuple[int, int, float]]]) -> None:
    made, expected = [], {}
    for blocks in plans:
        rows = [(level, tokens, int(tokens * share)) for level, tokens, share in blocks]
        columns = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).unbind(1)
        made.append(SimpleNamespace(level=columns[0], tokens=columns[1], kept=columns[2], min_block_size=8))
        for level, tokens, kept in rows:
            entry = expected.setdefault(8 * 2**level, [0, 0, 0])
            expected[8 * 2**level] = [entry[0] + 1, entry[1] + tokens, entry[2] + kept]
    found = inspect.block_density(made)
    assert {row["length"]: [row["blocks"], row["tokens"], row["kept"]] for row in found} == expected
    assert all(row["density"] == row["kept"] / row["tokens"] for row in found)
    assert [row["length"] for row in found] == sorted(expected)


def test_equal_neighbours_are_one_row() -> None:
    assert inspect._runs([(0, (1, 2)), (1, (1, 2)), (2, (3, 2)), (3, (1, 2))]) == [
        ([0, 1], (1, 2)),
        ([2], (3, 2)),
        ([3], (1, 2)),
    ]
    assert inspect._runs([]) == []
