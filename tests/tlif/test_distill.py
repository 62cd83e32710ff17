"""Distillation end to end on a random model: determinism, interruption, refusals, the command."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tlif_tools import Characters, tiny
from typer.testing import CliRunner

import hisparse.tlif.distill as module
from hisparse.cli.distill import distill as command
from hisparse.errors import HiSparseError, InputError
from hisparse.identity import ModelIdentity
from hisparse.tlif import load_tlif, read_card
from hisparse.tlif.corpus import draw_windows
from hisparse.tlif.distill import DistillPlan, checkpoint_path, distill

MODEL = tiny("llama")


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    words = [("".join(random.Random(i).choices("abcdefghij", k=i % 7 + 2))) for i in range(40)]
    paths = []
    for index in range(3):
        path = tmp_path / f"{index}.txt"
        path.write_text(" ".join(random.Random(index).choices(words, k=3000)), encoding="utf-8")
        paths.append(path)
    return paths


def plan_of(texts: list[Path], **changes: Any) -> DistillPlan:
    base = DistillPlan((texts[0], texts[1]), (texts[2],), tokens=1500, chunk=200, epochs=1, prefix_length=16)
    return replace(base, **changes)


def run(plan: DistillPlan, output: Path, **options: Any) -> bytes:
    distill(MODEL, Characters(), plan, output, "hisparse distill", **options)
    return output.read_bytes()


@pytest.mark.parametrize("label", ["key_distinctiveness", "received_attention"])
def test_a_file_is_written_with_its_scores(texts: list[Path], tmp_path: Path, label: str) -> None:
    output = tmp_path / "out.tlif.safetensors"
    run(plan_of(texts, label=label), output)
    card = read_card(output)
    assert (card.label, card.prefix_length) == (label, 16)
    assert set(card.scores["held_out"]) == {"2.txt", "all"}
    assert 0 <= card.scores["held_out"]["all"]["auc"] <= 1
    assert card.scores["thresholds"] == {"128K": 0.32, "7.5K": 0.2279}
    assert not checkpoint_path(output).exists()
    scorer = load_tlif(output, ModelIdentity.of(MODEL))
    assert scorer.score(torch.randn(50, scorer.features), None)[0].isfinite().all()


def test_an_interrupted_run_goes_on_and_ends_the_same(
    texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(texts)
    expected = run(plan, tmp_path / "whole")

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "labels" and done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "cut", report=interrupt)
    assert checkpoint_path(tmp_path / "cut").exists()
    assert not (tmp_path / "cut").exists()
    labelled: list[int] = []
    original = module.label_window
    monkeypatch.setattr(module, "label_window", lambda *a: (labelled.append(1), original(*a))[1])
    stages: list[tuple[str, int, int]] = []
    assert run(plan, tmp_path / "cut", report=lambda *event: stages.append(event)) == expected
    total = next(total for stage, _, total in stages if stage == "labels")
    assert len(labelled) == total - 5
    assert stages[0] == ("labels", 5, total)


def test_without_held_out_files_an_eighth_of_the_windows_is_held_out(texts: list[Path], tmp_path: Path) -> None:
    plan = plan_of(texts, held_out=())
    run(plan, tmp_path / "out.safetensors")
    assert read_card(tmp_path / "out.safetensors").scores["held_out"]["all"]["tokens"] == plan.windows // 8 * (200 - 16)


def test_a_checkpoint_of_other_arguments_is_refused(texts: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out"

    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan_of(texts), output, report=interrupt)
    for changes in ({"seed": 1}, {"label": "received_attention"}, {"tokens": 1600}, {"corpus": (texts[0],)}):
        with pytest.raises(InputError, match="--restart"):
            run(plan_of(texts, **changes), output)
    texts[0].write_text(texts[0].read_text() + " more", encoding="utf-8")
    with pytest.raises(InputError, match="--restart"):
        run(plan_of(texts), output)
    checkpoint_path(output).write_bytes(b"half a file")
    with pytest.raises(InputError, match="damaged"):
        run(plan_of(texts), output)
    run(plan_of(texts), output, restart=True)
    assert output.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": "beauty"}, "label 'beauty' is unknown"),
        ({"corpus": ()}, "no corpus file"),
        ({"tokens": 0}, "tokens = 0"),
        ({"epochs": -1}, "epochs = -1"),
        ({"prefix_length": 0}, "prefix_length = 0"),
        ({"chunk": 60}, "chunk = 60"),
    ],
)
def test_bad_plans_are_refused(texts: list[Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_of(texts, **changes)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00", b"short"])
def test_unusable_corpora_are_refused(texts: list[Path], tmp_path: Path, content: bytes | None) -> None:
    bad = tmp_path / "bad.txt"
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.txt"):
        run(plan_of(texts, corpus=(bad,)), tmp_path / "out.safetensors")


def test_windows_are_full_disjoint_and_seeded(texts: list[Path]) -> None:
    first = draw_windows(Characters(), texts, 30, 100, 0)
    assert [window.source for window in first[:3]] == ["0.txt", "1.txt", "2.txt"]
    assert all(len(window.ids) == 100 and window.ids[0] == 1 for window in first)
    again, other = (draw_windows(Characters(), texts, 30, 100, seed) for seed in (0, 1))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a.ids, b.ids) for a, b in zip(first, other, strict=True))
    rows = {tuple(window.ids[1:].tolist()) for window in first}
    assert len(rows) == 30


def test_a_short_file_gives_fewer_windows_instead_of_overlapping_ones(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("abcdefghij" * 50, encoding="utf-8")
    windows = draw_windows(Characters(), [path], 100, 99, 0)
    assert len(windows) == 5


class TestCommand:
    @pytest.fixture
    def call(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr("hisparse.models.load_model", lambda name, *options: (MODEL, Characters()))
        app = typer.Typer()
        app.command()(command)
        return lambda *words: CliRunner().invoke(app, [str(word) for word in words])

    def test_it_writes_the_file_and_the_command(self, call: Any, texts: list[Path], tmp_path: Path) -> None:
        output = tmp_path / "out.tlif.safetensors"
        sizes = ("--tokens", 1500, "--chunk", 200, "--epochs", 1, "--prefix-length", 16, "--seed", 3)
        result = call("--model", "m", "--corpus", texts[0], texts[1], "-o", output, *sizes)
        assert result.exit_code == 0, result.output
        card = read_card(output)
        assert card.command == (
            "hisparse distill --model m --corpus 0.txt --corpus 1.txt --label key_distinctiveness --tokens 1500 "
            "--chunk 200 --epochs 1 --seed 3 --prefix-length 16 -o out.tlif.safetensors"
        )

    def test_a_dtype_is_part_of_the_command(self, call: Any, texts: list[Path], tmp_path: Path) -> None:
        sizes = ("--tokens", 1500, "--chunk", 200, "--epochs", 1, "--prefix-length", 16, "--dtype", "bfloat16")
        result = call("--corpus", texts[0], texts[1], "-o", tmp_path / "out.tlif.safetensors", *sizes)
        assert result.exit_code == 0, result.output
        assert "--dtype bfloat16 -o" in read_card(tmp_path / "out.tlif.safetensors").command

    def test_stray_files_beside_held_out_ones_are_refused(self, call: Any, texts: list[Path], tmp_path: Path) -> None:
        result = call("--corpus", texts[0], "--held-out", texts[1], texts[2], "-o", tmp_path / "out.safetensors")
        assert isinstance(result.exception, HiSparseError)
        assert "2.txt" in str(result.exception)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--device", "potato"), "--device potato: "),
            (("--dtype", "int3"), "--dtype int3: unknown"),
            (("--chunk", 5000), "5000: the model default has 1024 positions"),
            (("--corpus", "nowhere.txt"), "nowhere.txt: no such file"),
            (("--output", "."), "a directory"),
        ],
    )
    def test_bad_options_are_refused(
        self, call: Any, texts: list[Path], tmp_path: Path, words: tuple[Any, ...], message: str
    ) -> None:
        result = call("--corpus", texts[0], "-o", tmp_path / "out.safetensors", *words)
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
    def test_a_missing_gpu_is_refused(self, call: Any, texts: list[Path], tmp_path: Path) -> None:
        result = call("--corpus", texts[0], "-o", tmp_path / "out.safetensors", "--device", "cuda")
        assert "--device cuda: " in str(result.exception)
        assert "use cpu" in str(result.exception)

    def test_a_missing_folder_is_refused_before_the_work(self, call: Any, texts: list[Path], tmp_path: Path) -> None:
        result = call("--corpus", texts[0], "-o", tmp_path / "none" / "out")
        assert isinstance(result.exception, InputError)


@pytest.mark.real_model
def test_the_shipped_tlif_ranks_the_default_models_tokens(default_model: tuple[Any, Any]) -> None:
    """On a text of the standard library that no distillation read whole."""
    from pydoc_data.topics import topics

    from hisparse.config import TlifConfig
    from hisparse.tlif import scorer_for
    from hisparse.tlif.labels import label_window, layer0_values
    from hisparse.tlif.training import Examples, auc

    model, tokenizer = default_model
    text = topics["typesmapping"] + topics["exceptions"]
    ids = torch.tensor(tokenizer.encode(text)[:512])
    label = label_window(model, ids, "key_distinctiveness", 128)
    label[:128] = torch.nan
    values = layer0_values(model, ids)
    importance, _ = scorer_for(ModelIdentity.of(model), TlifConfig()).score(values, None)
    examples = Examples.of_window(importance.unsqueeze(1), label)
    assert auc(examples.inputs[:, 0], examples.targets) > 0.8
    assert float((importance >= TlifConfig().threshold(7500)).float().mean()) <= 0.37
