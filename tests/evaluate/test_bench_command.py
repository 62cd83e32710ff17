"""`hisparse bench` from files to JSON, on a tiny model."""

from __future__ import annotations

import json
import re

import pytest
import torch
from evaluate_tools import byte_tokenizer, prose, tiny_llama
from typer.testing import CliRunner

from hisparse.cli.bench import bench_app
from hisparse.errors import HiSparseError, InputError
from hisparse.evaluate.speed import SpeedRefusedError

# A tiny model has neither a TLIF nor a calibration file, and is told so.
pytestmark = pytest.mark.filterwarnings("ignore:no TLIF", "ignore:no calibration")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    tiny_llama().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(prose(), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"tlif": {"scorer": "novelty"}}), encoding="utf-8")
    return folder


@pytest.fixture
def bench(files):
    """Runs a subcommand and returns (its JSON, its output); errors of ours are raised. Threads are put back."""
    threads = torch.get_num_threads()

    def run(command: str, *arguments: str):
        out = files / "out.json"
        common = ("--model", files / "model", "--text", files / "text.txt", "--json", out, "--device", "cpu")
        result = CliRunner().invoke(bench_app, [command, *map(str, common), *map(str, arguments)])
        if isinstance(result.exception, HiSparseError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return json.loads(out.read_text()), result.stdout

    yield run
    torch.set_num_threads(threads)


def test_quality_measures_three_suites_and_both_configurations(bench, files):
    sizes = ("--needle-tokens", 700, "--contexts", 2, "--needles", 3, "--tokens", 400, "--windows", 1, "--decode", 8)
    found, shown = bench(
        "quality", *sizes, "--config", files / "config.json", "--scratch", files / "dense", "--threads", 1
    )
    assert found["environment"]["threads"] == 1
    assert found["config"]["tlif"]["scorer"] == "novelty"
    assert [found[suite]["dense"]["questions"] for suite in ("single", "multi_key")] == [2, 6]
    for name in ("hisparse", "economy"):
        assert found["multi_key"][name]["questions"] == 6
        assert set(found["multi_key"][name]["against_dense"]) >= {"lost", "gained", "relative_accuracy"}
        assert found["fidelity"][name]["tokens"] == 8
        assert found["fidelity"][name]["kv"]["tokens"]["total"] == 400
        assert name in shown
    assert found["fidelity"]["economy"]["kv"]["gpu_bytes"] < found["fidelity"]["hisparse"]["kv"]["gpu_bytes"]
    assert len(list((files / "dense").iterdir())) == 1


def test_dense_only_needs_no_hisparse_cache(bench):
    found, _ = bench("quality", "--dense-only", "--suite", "single", "--needle-tokens", 700, "--contexts", 1)
    assert set(found["single"]) == {"tokens", "contexts", "needles", "dense"}
    with pytest.raises(InputError, match="--dense-only compares nothing in fidelity"):
        bench("quality", "--dense-only", "--suite", "fidelity")


def test_speed_reports_ratios_or_refuses(bench):
    sizes = ("--tokens", 200, "--decode", 4, "--rounds", 2)
    found, shown = bench("speed", *sizes, "--max-kl", 100)
    assert found["speed"]["ratio"]["decode"]["median"] > 0
    assert found["speed"]["check"]["tokens"] == 4
    assert "ms/token" in shown
    with pytest.raises(SpeedRefusedError, match="mean KL of hisparse against dense"):
        bench("speed", *sizes, "--max-kl", 0)


def test_bad_arguments_are_named_before_any_work(bench, files):
    with pytest.raises(InputError, match="window is 4096"):
        bench("speed", "--tokens", 5000)
    with pytest.raises(InputError, match=r"missing\.safetensors"):
        bench("speed", "--tokens", 100, "--decode", 4, "--tlif", files / "missing.safetensors")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--tokens", 400, "--windows", 1, "--decode", 400],
            "400 tokens to decode in a window of 400: decode 1 to 399",
        ),
        (["--tokens", 4000], r"--text short\.txt, --tokens 4000: the text has \d+ tokens, a window needs 4001"),
        (["--scratch", "{folder}/short.txt"], r"--scratch .*short\.txt: no folder"),
    ],
)
def test_what_fidelity_needs_is_checked_before_the_first_suite_runs(
    files, monkeypatch, arguments: list[object], says: str
):
    def retrieve(*_: object, **__: object) -> None:
        pytest.fail("a suite ran first")

    monkeypatch.setattr("hisparse.evaluate.retrieval.retrieve", retrieve)
    (files / "short.txt").write_text(prose(20), encoding="utf-8")
    words = [str(word).format(folder=files) for word in arguments]
    common = ["--model", str(files / "model"), "--text", str(files / "short.txt"), "--device", "cpu", "--contexts", "1"]
    result = CliRunner().invoke(bench_app, ["quality", *common, "--needle-tokens", "300", *words])
    assert isinstance(result.exception, InputError), result.output
    assert re.search(says, str(result.exception))
