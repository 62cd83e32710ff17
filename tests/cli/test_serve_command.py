"""`hisparse serve`: what the command line refuses or warns of before vLLM starts. Needs no vLLM."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.cli.serve import compose, unused_keys
from hisparse.cli.words import FLAGS, SEVERAL, take_model
from hisparse.config import HiSparseConfig
from hisparse.errors import InputError

MACHINE = {"gpus": 1, "memory": 0}


@pytest.mark.parametrize(
    ("model", "tokens", "said"),
    [("/nonexistent", None, "/nonexistent: no such directory"), ("./x", None, "no such directory")]
    + [("org/model", tokens, "multiple of 16") for tokens in (0, -16, 100)],
)
def test_what_cannot_be_served_is_said_at_once(model: str, tokens: int | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        compose(model, None, None, None, tokens, [], MACHINE)


def test_a_hub_id_and_a_directory_pass(tmp_path: Path) -> None:
    assert compose("org/model", None, None, None, 128, [], MACHINE)[2] == "org/model"
    (tmp_path / "config.json").write_text("{}")
    assert compose(str(tmp_path), None, None, None, None, [], MACHINE)[2] == str(tmp_path)


def test_keys_without_effect_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"selection": {"scan_interval": 2}, "blgs": {"bandwidth_weight": 0.5}}))
    compose("org/model", path, None, None, None, [], MACHINE)
    assert "vLLM does without blgs, selection.scan_interval" in capsys.readouterr().err
    assert unused_keys(HiSparseConfig()) == []


@pytest.mark.parametrize(
    ("line", "model", "others"),
    [
        ("", None, ""),
        ("m", "m", ""),
        ("--port 9000 m", "m", "--port 9000"),
        ("--port 9000", None, "--port 9000"),
        ("--port=9000 m --dtype auto", "m", "--port=9000 --dtype auto"),
        ("--enforce-eager m", "m", "--enforce-eager"),
        ("--no-enable_prefix-caching m", "m", "--no-enable_prefix-caching"),
        ("-tp 2 m -dph", "m", "-tp 2 -dph"),
        ("-O3 m", "m", "-O3"),
        ("-O 3 m", "m", "-O 3"),
        ("--max-model-len -1 m", "m", "--max-model-len -1"),
        ("m --served-model-name a b --port 1", "m", "--served-model-name a b --port 1"),
        ("--served-model-name a b --port 1 m", "m", "--served-model-name a b --port 1"),
        ("--kv-transfer-config.kv_role kv_both m", "m", "--kv-transfer-config.kv_role kv_both"),
        ("--lora-modules sql=/a pg=/b", None, "--lora-modules sql=/a pg=/b"),
    ],
)
def test_the_model_is_found_wherever_it_stands(line: str, model: str | None, others: str) -> None:
    assert take_model(line.split()) == (model, others.split())


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("default other", "other"),
        ("--port 9000 default 9001", "9001"),
        ("default --port 9000 1234 --dtype auto", "1234"),
        ("default --enforce-eager true", "true"),
        ("default --dtype=auto float16", "float16"),
        ("a b c", "b"),
    ],
)
def test_a_stray_word_is_named_with_what_to_do(cli: Any, line: str, word: str) -> None:
    code, out, err = cli("serve", "--dry-run", *line.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {word}: one model is served, and ")
    assert f"leave {word} out" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("words", [["--model", "org/m"], ["--model=org/m", "--port", "1"]])
def test_the_model_is_no_option(cli: Any, words: list[str]) -> None:
    code, out, err = cli("serve", "--dry-run", *words)
    assert (code, out) == (2, "")
    assert err == "error: --model org/m: leave --model out, the model is a word of its own: serve org/m\n"


@pytest.mark.parametrize("words", [["--port", "9000", "MODEL"], ["MODEL", "--port", "9000"]], ids=["behind", "before"])
def test_options_of_vllm_may_stand_on_either_side_of_the_model(
    cli: Any, tiny_directory: Path, words: list[str]
) -> None:
    given_words = [str(tiny_directory) if word == "MODEL" else word for word in words]
    code, out, err = cli("serve", "--dry-run", "--block-tokens", 64, *given_words, "--enforce-eager")
    assert code == 0, err
    assert out.startswith(f"vllm serve {tiny_directory} ")
    assert out.endswith(" --port 9000 --enforce-eager\n")


VALUE = st.text("ab=/.1-", min_size=1, max_size=4).filter(lambda word: not word.startswith("-"))
ONE = st.tuples(st.sampled_from(["--port", "--dtype", "-tp", "--hf-overrides.a"]), VALUE).map(list)
NONE = st.sampled_from(sorted(FLAGS)).map(lambda name: [name])
MANY = st.tuples(st.sampled_from(sorted(SEVERAL)), VALUE, VALUE).map(list)
GLUED = st.tuples(st.sampled_from([*sorted(SEVERAL), "--port"]), VALUE).map(lambda pair: ["=".join(pair)])


@given(before=st.lists(ONE | NONE | GLUED, max_size=4), after=st.lists(ONE | NONE | GLUED | MANY, max_size=4))
def test_every_word_is_kept_in_its_order(before: list[list[str]], after: list[list[str]]) -> None:
    first, last = list(chain(*before)), list(chain(*after))
    assert take_model([*first, "org/model", *last]) == ("org/model", first + last)
    assert take_model(first + last) == (None, first + last)
