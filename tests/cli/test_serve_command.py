"""`hisparse serve`: what the command line refuses or warns of before vLLM starts. Needs no vLLM."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.cli.early import check_source
from hisparse.cli.serve import compose, unused_keys
from hisparse.cli.words import FLAGS, SEVERAL, take_model
from hisparse.config import HiSparseConfig
from hisparse.errors import InputError, ModelError

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


class FakeHub:
    """Answers with an error, or, for None, that it has the model."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def model_info(self, name: str, timeout: float) -> None:
        if self.error is not None:
            raise self.error


def hub_error(kind: str, status: int) -> Exception:
    """One of the hub's own, which are made from a response."""
    import huggingface_hub.errors

    made: type[Exception] = getattr(huggingface_hub.errors, kind)
    error = made.__new__(made)
    error.args = (f"{status} from the hub",)
    return error


@pytest.mark.parametrize(
    ("error", "options", "said"),
    [
        (OSError("Name or service not known"), {}, r"hub did not give it \(Name or service not known\); check the sp"),
        (TimeoutError(), {}, r"hub did not give it \(TimeoutError\); check the spelling and the connection"),
        (hub_error("RepositoryNotFoundError", 404), {}, "hub has no such model, or not without a token; check"),
        (hub_error("RepositoryNotFoundError", 404), {"--hf-token": "t"}, None),
        (hub_error("HfHubHTTPError", 503), {}, None),
        (None, {}, None),
    ],
    ids=["no connection", "silent", "unknown", "unknown without the token", "overloaded", "there"],
)
def test_the_hub_is_asked_once_before_the_server_starts(
    error: Exception | None, options: dict[str, str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: FakeHub(error))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    if said is None:
        check_source("nodir", options)
        return
    with pytest.raises(ModelError, match=f"^nodir: no directory of that name, .*{said}"):
        check_source("nodir", options)


def test_without_vllm_it_is_said_how_to_install_it(
    cli: Any, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hisparse.cli.serve.find_spec", lambda name: None)
    code, _, err = cli("serve", tiny_directory, "--block-tokens", 64)
    assert code != 0
    assert err.count("\n") == 1
    assert "source tree say pip install -e '.[vllm]'" in err
    assert "hisparse[vllm]" not in err


LLAMA = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.mark.parametrize("more", [{}, {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}])
@pytest.mark.parametrize("length", ["300", "8K", "auto"])
def test_memory_for_no_request_is_refused(length: str, more: dict[str, Any], tmp_path: Path) -> None:
    """And what the message asks for is enough."""
    text = {**LLAMA, "max_position_embeddings": 8192, **more}
    (tmp_path / "config.json").write_text(json.dumps(text))

    def serve(*extra: str) -> list[str]:
        return compose(str(tmp_path), None, None, None, None, ["--max-model-len", length, *extra], MACHINE)

    words = ["--kv-cache-memory-bytes", "1000", "--load-format", "dummy"]
    tokens = {"300": "300 tokens", "8K": "8192 tokens", "auto": "1 token"}[length]
    with pytest.raises(InputError, match=f"memory-bytes 1000: one request of {tokens} takes [0-9]+ bytes") as refused:
        serve(*words)
    assert ("--max-model-len smaller" in str(refused.value)) == (length != "auto")
    need = int(str(refused.value).split(" takes ")[1].split()[0])
    words[1] = str(need - 1)
    with pytest.raises(InputError, match=f"memory-bytes {need - 1}: "):
        serve(*words)
    words[1] = str(need)
    assert str(need) in serve(*words)
    for passed in (["1000", "--num-gpu-blocks-override", "9"], ["0"], ["4g"], ["1.5g"]):
        serve("--kv-cache-memory-bytes", *passed, "--load-format", "dummy")
