"""`hisparse generate` on a tiny model: its JSON, its comparison with the dense cache, and every bad input."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from hisparse.cli import generate as command
from hisparse.cli import session
from hisparse.config import HiSparseConfig

EXACT = {"vtq": {"enable_per_block_quant": False}, "evict": "none"}


def run_json(cli: Any, tmp_path: Path, *arguments: Any) -> tuple[dict[str, Any], str]:
    out = tmp_path / "out.json"
    code, stdout, err = cli("generate", "--json", out, "--device", "cpu", *arguments)
    assert code == 0, err
    return json.loads(out.read_text()), stdout


def test_json_has_the_documented_keys_and_they_add_up(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path
) -> None:
    data, stdout = run_json(cli, tmp_path, "-m", tiny_directory, "-f", text_file, "-n", 9, "--compare-dense")
    assert {"text", "prompt_tokens", "new_tokens", "kv", "tokens", "blocks", "recall", "seconds", "dense"} <= set(data)
    assert {"dense_bytes", "gpu_bytes", "host_bytes", "capacity"} <= set(data["kv"])
    assert {"anchors", "kept", "set_aside"} <= set(data["tokens"])
    assert {"blocks", "bytes"} <= set(data["recall"])
    assert set(data["seconds"]) == {"prefill", "decode"}
    assert {"text", "token_agreement", "mean_kl"} <= set(data["dense"])
    assert data["prompt_tokens"] == len(text_file.read_bytes())
    assert 1 <= data["new_tokens"] <= 9
    tokens = data["tokens"]
    assert sum(tokens[name] for name in ("dense", "kept", "set_aside", "dropped")) == tokens["total"]
    # 2 layers x K and V x 2 heads x 16 channels x 2 bytes
    assert data["kv"]["dense_bytes"] == tokens["total"] * 2 * 2 * 2 * 16 * 2
    assert data["kv"]["gpu_bytes"] == sum(data["kv"]["device"].values())
    assert data["kv"]["capacity"] == pytest.approx(data["kv"]["dense_bytes"] / data["kv"]["gpu_bytes"])
    assert data["text"].strip() in stdout


@pytest.mark.parametrize("chunk", [None, 37, 599, 5000])
@pytest.mark.parametrize("question", [None, "How many?"])
def test_with_everything_kept_the_text_is_the_dense_text(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path, chunk: int | None, question: str | None
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(EXACT))
    extra = ["--chunk", chunk] if chunk else []
    extra += ["--question", question] if question else []
    arguments = ("-m", tiny_directory, "-f", text_file, "-c", config, "-n", 12, "--compare-dense", *extra)
    data, _ = run_json(cli, tmp_path, *arguments)
    assert data["dense"]["text"] == data["text"]
    assert data["dense"]["token_agreement"] == 1.0
    assert abs(data["dense"]["mean_kl"]) < 1e-6
    assert (data["question_tokens"] > 0) == (question is not None)


@pytest.mark.parametrize("question", [None, "How many?"])
@pytest.mark.parametrize("new", [1, 7])
def test_divergence_and_agreement_match_a_forward_pass_without_any_cache(
    tiny_directory: Path, text_file: Path, question: str | None, new: int
) -> None:
    model, tokenizer = session.open_model(str(tiny_directory), "cpu", None)
    prompt = session.build_prompt(tokenizer, text_file.read_text(), question)
    config = HiSparseConfig(tlif={"scorer": "random"})
    result = session.complete(model, tokenizer, prompt, config, new, compare=True)
    assert result.dense is not None
    assert result.logits is not None
    n = len(result.new_ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        ids = torch.cat([prompt.ids, torch.tensor([result.new_ids])], dim=1)
        theirs = log_softmax(model(ids).logits[0, prompt.length - 1 : -1].double().numpy(), axis=-1)
    ours = log_softmax(result.logits.double().numpy(), axis=-1)
    kl = float((np.exp(theirs) * (theirs - ours)).sum(-1).mean())
    assert ours.shape == (n, 258)
    assert result.dense["mean_kl"] == pytest.approx(kl, abs=1e-6)
    # The first token is chosen by exact attention; later ones by packed and recalled tokens, which must show.
    assert n == 1 or result.dense["mean_kl"] > 1e-7
    assert result.dense["token_agreement"] == pytest.approx((theirs.argmax(-1) == np.array(result.new_ids)).mean())


def test_the_dense_comparison_is_announced(cli: Any, tiny_directory: Path, text_file: Path) -> None:
    for extra in ([], ["--compare-dense"]):
        code, _, err = cli("generate", "-m", tiny_directory, "-f", text_file, "-n", 2, *extra)
        assert code == 0, err
        assert ("The same with the dense cache ...\n" in err) == bool(extra)


def test_new_tokens_are_the_greedy_choice_of_their_logits(tiny_directory: Path, text_file: Path) -> None:
    model, tokenizer = session.open_model(str(tiny_directory), "cpu", None)
    prompt = session.build_prompt(tokenizer, text_file.read_text())
    result = session.complete(model, tokenizer, prompt, HiSparseConfig(), 8, compare=True)
    assert result.logits is not None
    assert result.logits.argmax(-1).tolist() == result.new_ids


def test_sampling_follows_its_seed(cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path) -> None:
    common = ("-m", tiny_directory, "-f", text_file, "-n", 16, "-t", 1.5)
    texts = [run_json(cli, tmp_path, *common, "--seed", seed)[0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("mode", ["full", "recall"])
@pytest.mark.parametrize(
    ("chunk", "question", "chunks"),
    [(None, None, 0), (None, "How many?", 1), (250, None, 2), (250, "How many?", 3), (599, None, 0)],
)
def test_recall_is_counted_by_decode_steps_and_by_chunks(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path, chunk: int | None, question: str | None,
    chunks: int, mode: str,
) -> None:  # fmt: skip
    """The text's first chunk finds nothing to recall, and the first new token comes out of the last one."""
    config = write(tmp_path / "c.json", json.dumps({"prefill": {"mode": mode, "recall_max_tokens": 8}}).encode())
    extra = [*(["--chunk", chunk] if chunk else []), *(["--question", question] if question else [])]
    out = tmp_path / "out.json"
    code, _, err = cli("generate", "-m", tiny_directory, "-f", text_file, "-c", config, "-n", 6, "--json", out, *extra)
    assert code == 0, err
    data = json.loads(out.read_text())
    assert data["new_tokens"] > 2
    # A last chunk of a single token is a step like those of the new tokens.
    steps = data["new_tokens"] - 1 + (chunk == 599)
    assert (data["recall"]["steps"], data["recall"]["chunks"]) == (steps, chunks)
    said = " ".join(err.split())
    assert f" in {steps} decode steps" in said
    assert (f"{chunks} chunk" in said) == (chunks > 0)
    assert ("1 chunk of the prompt" in said) == (chunks == 1)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b" \n\t ", "empty"),
        (b"\xff\xfe\x00\x01", "not UTF-8 text"),
        (b"text\x00more", "binary"),
        (None, "No such file"),
    ],
)
def test_a_bad_prompt_file_is_named(
    cli: Any, tmp_path: Path, tiny_directory: Path, data: bytes | None, says: str
) -> None:
    path = tmp_path / "bad.txt" if data is None else write(tmp_path / "bad.txt", data)
    code, out, err = cli("generate", "-m", tiny_directory, "-f", path)
    assert code == 2
    assert err.startswith(f"error: text file {path}: ")
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


@pytest.mark.parametrize(
    ("length", "new", "numbers"), [(1025, 1, ["1025", "1024"]), (1020, 5, ["1020", "5", "1024", "at most 4"])]
)
def test_a_prompt_beyond_the_window_names_both_numbers(
    cli: Any, tmp_path: Path, tiny_directory: Path, length: int, new: int, numbers: list[str]
) -> None:
    path = write(tmp_path / "long.txt", b"ab" * (length // 2) + b"c" * (length % 2))
    code, _, err = cli("generate", "-m", tiny_directory, "-f", path, "-n", new)
    assert code == 2
    assert all(number in err for number in numbers), err


def test_a_prompt_that_fills_the_window_exactly_is_accepted(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path
) -> None:
    path = write(tmp_path / "full.txt", (text_file.read_bytes() * 2)[:1020])
    data, _ = run_json(cli, tmp_path, "-m", tiny_directory, "-f", path, "-n", 4)
    assert data["prompt_tokens"] == 1020


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('{"tlif": {"treshold_base": 0.3}}', "tlif.treshold_base"),
        ('{"hidden_size": 65}', "65"),
        ('{"vtq": 3}', "vtq"),
        ("{", "not JSON"),
        ("[]", "list"),
    ],
)
def test_a_bad_config_names_the_key(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path, config: str, says: str
) -> None:
    path = write(tmp_path / "c.json", config.encode())
    code, _, err = cli("generate", "-m", tiny_directory, "-f", text_file, "-c", path)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--config", "/nowhere/c.json", "/nowhere/c.json"),
        ("--tlif", "/nowhere/t.safetensors", "--tlif"),
        ("--calibration", "/nowhere/c.safetensors", "--calibration"),
        ("--json", "/nowhere/out.json", "/nowhere"),
        ("--device", "toaster", "toaster"),
        ("--dtype", "int8", "int8"),
        ("--question", "  ", "question is empty"),
        ("--model", "/nowhere/model", "/nowhere/model"),
    ],
)
def test_a_bad_option_is_named(
    cli: Any, tiny_directory: Path, text_file: Path, option: str, value: str, says: str
) -> None:
    code, _, err = cli("generate", "-m", tiny_directory, "-f", text_file, option, value)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ")


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    command.write_json(path, {"a": "ü"})
    with pytest.raises(TypeError):
        command.write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ü"}


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (3 << 39, "1.5 TiB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert command.size(count) == text


@pytest.mark.parametrize(("option", "kind"), [("--tlif", "tlif"), ("--calibration", "calibration")])
def test_a_file_of_another_model_is_refused(
    cli: Any, tiny_directory: Path, text_file: Path, option: str, kind: str
) -> None:
    shipped = sorted(files("hisparse").joinpath("data").glob(f"*.{kind}.safetensors"))  # type: ignore[attr-defined]
    assert shipped, "the default model's files ship with the package"
    code, _, err = cli("generate", "-m", tiny_directory, "-f", text_file, option, shipped[0])
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ")
    assert "576" in err  # both models' hidden sizes are named
    assert "64" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--tlif", "--calibration"])
def test_a_damaged_companion_file_is_refused(
    cli: Any, tmp_path: Path, tiny_directory: Path, text_file: Path, option: str
) -> None:
    path = write(tmp_path / "bad.safetensors", b'\x10\0\0\0\0\0\0\0{"a"')
    code, _, err = cli("generate", "-m", tiny_directory, "-f", text_file, option, path)
    assert code == 2
    assert "bad.safetensors" in err
    assert "Traceback" not in err


def test_the_summary_says_when_the_byte_target_is_out_of_reach(cli: Any, tiny_directory: Path, text_file: Path) -> None:
    code, _, err = cli("generate", "-m", tiny_directory, "-f", text_file, "-n", 2, "--device", "cpu")
    assert code == 0
    assert "short of the target of x9" in " ".join(err.split())
