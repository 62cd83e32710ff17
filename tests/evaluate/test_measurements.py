"""Retrieval, fidelity and speed on models whose right result is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from evaluate_tools import BlurredCaches, Lists, Lookup, byte_tokenizer, prose, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.config import HiSparseConfig
from hisparse.errors import InputError
from hisparse.evaluate.caches import DenseCaches, HiSparseCaches, feed
from hisparse.evaluate.environment import environment
from hisparse.evaluate.fidelity import decode_logits, dense_logits, divergence, fidelity
from hisparse.evaluate.needles import build_contexts
from hisparse.evaluate.retrieval import Answer, Retrieval, compare, retrieve
from hisparse.evaluate.speed import SpeedRefusedError, compare_speed

TOKENIZER = byte_tokenizer()
TEXT = prose()


def window(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (1, tokens + 1), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["single", "multi_key"])
def test_a_perfect_reader_finds_every_needle_and_a_forgetful_one_those_it_kept(kind):
    contexts = build_contexts(TOKENIZER, TEXT, kind, 1500, 4, needles=3)
    forget = 900
    dense, ours = retrieve(Lookup(TOKENIZER), TOKENIZER, contexts, [Lists("dense"), Lists("ours", forget)])
    assert dense.correct == len(dense.answers) == (4 if kind == "single" else 12)
    intro = len("<|user|>Read the following text. Some facts are hidden in it; remember them.\n\n")
    kept = [
        intro + context.document.index(f"Note this: {needle.key} =") >= forget
        for context in contexts
        for needle in context.needles
    ]
    assert [answer.correct for answer in ours.answers] == kept
    pair = ours.to_json(dense)["against_dense"]
    assert pair["lost"] == kept.count(False) > 0
    assert pair["gained"] == 0
    assert pair["relative_accuracy"] == pytest.approx(sum(kept) / len(kept))
    json.dumps(ours.to_json(dense), allow_nan=False)


def test_questions_on_a_context_share_its_prefill():
    contexts = build_contexts(TOKENIZER, TEXT, "multi_key", 2000, 1, needles=5)
    model = Lookup(TOKENIZER)
    retrieve(model, TOKENIZER, contexts, [Lists("dense")])
    assert model.prefilled < contexts[0].tokens + 200 + 5 * 200


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        (" 12345.", True),
        (":\n12345", True),
        (" 123456", False),
        (" 1234", False),
        (" none", False),
        ("99 12345", False),
    ],
)
def test_an_answer_counts_only_digit_for_digit(text, correct):
    assert Answer(0, "Alice", 0.5, "12345", text).correct is correct


def test_answers_to_different_questions_are_not_compared():
    one, two = (
        Retrieval("x", (Answer(0, key, 0.5, "12345", "12345"),), ({"capacity": 1.0},), 0.0) for key in ("Oslo", "Rome")
    )
    with pytest.raises(InputError, match="different questions"):
        compare(one, two)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(2, 60), st.integers(0, 10**6), st.floats(0.0, 5.0))
def test_divergence_is_numpys(n, vocabulary, seed, noise):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(n, vocabulary)) * 3
    b = a + noise * rng.normal(size=a.shape)
    targets = rng.integers(0, vocabulary, n)
    found = divergence(torch.tensor(a), torch.tensor(b), torch.tensor(targets))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    np.testing.assert_allclose(found.kl, np.maximum((p * np.log(p / q)).sum(-1), 0), atol=1e-12)
    np.testing.assert_allclose(found.nll, -np.log(q[np.arange(n), targets]), atol=1e-12)
    np.testing.assert_allclose(found.dense_nll, -np.log(p[np.arange(n), targets]), atol=1e-12)
    np.testing.assert_array_equal(found.agree, p.argmax(-1) == q.argmax(-1))
    summary = found.to_json()
    perplexity = [np.prod(x[np.arange(n), targets] ** (-1 / n)) for x in (p, q)]
    assert [summary["dense_perplexity"], summary["perplexity"]] == pytest.approx(perplexity)
    assert summary["perplexity_ratio"] == pytest.approx(perplexity[1] / perplexity[0])


def test_logits_that_are_not_finite_are_a_fault():
    good, bad = torch.zeros(20, 5), torch.zeros(20, 5)
    bad[17, 2] = float("nan")
    with pytest.raises(ArithmeticError, match="tokens 16 to 19"):
        divergence(good, bad, torch.zeros(20, dtype=torch.int64))


@pytest.mark.parametrize("chunk", [None, 13])
def test_the_dense_cache_does_not_diverge_from_itself(chunk):
    found = fidelity(tiny_llama(), [window(70), window(45, 1)], [DenseCaches()], 11, chunk=chunk)["dense"]
    assert found["tokens"] == 22
    assert found["mean_kl"] < 1e-9
    assert found["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
    assert found["argmax_agreement"] == 1
    assert found["capacity_min"] == 0.5  # float32 against the two bytes a value that capacity is stated in


def test_decoded_logits_are_those_of_one_plain_forward_pass():
    model, ids = tiny_llama(), window(40)
    with torch.inference_mode():
        expected = model(ids[:, :-1]).logits[0, -7:]
    rows, cache = decode_logits(model, DenseCaches(), ids, 7)
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 40


def test_a_damaged_cache_diverges():
    found = fidelity(tiny_llama(), [window(60)], [BlurredCaches(), DenseCaches()], 16)
    assert found["blurred"]["mean_kl"] > 100 * found["dense"]["mean_kl"]


def test_dense_logits_are_read_back_and_remade_where_damaged(tmp_path):
    model, ids = tiny_llama(), window(30)
    made = dense_logits(model, ids, 5, tmp_path)
    (path,) = tmp_path.iterdir()
    torch.testing.assert_close(dense_logits(model, ids, 5, tmp_path), made, atol=0, rtol=0)
    path.write_bytes(b"damaged")
    torch.testing.assert_close(dense_logits(model, ids, 5, tmp_path), made, atol=0, rtol=0)
    dense_logits(model, window(30, 1), 5, tmp_path)  # other tokens, another length, another model: other files
    dense_logits(model, ids, 6, tmp_path)
    dense_logits(tiny_llama(1), ids, 5, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(("tokens", "decoded"), [(10, 10), (10, 0)])
def test_a_window_without_room_is_refused(tokens, decoded):
    with pytest.raises(InputError, match=f"{decoded} tokens to decode in a window of {tokens}"):
        fidelity(tiny_llama(), [window(tokens)], [DenseCaches()], decoded)


@pytest.mark.filterwarnings("ignore:no calibration")
def test_a_fork_does_not_touch_its_origin():
    model = tiny_llama()
    for factory in (DenseCaches(), HiSparseCaches(HiSparseConfig(tlif={"scorer": "novelty"}))):
        cache = factory.new(model)
        feed(model, cache, window(400)[:, :-1])
        before, question = factory.report(cache), window(20, 1)
        first = feed(model, factory.fork(cache), question)
        second = feed(model, factory.fork(cache), question)
        torch.testing.assert_close(first, second, atol=0, rtol=0)
        assert factory.report(cache) == before
        torch.testing.assert_close(feed(model, cache, question), first, atol=0, rtol=0)


def test_speed_is_refused_to_a_damaged_cache_and_given_to_a_right_one():
    model, ids = tiny_llama(), window(60)
    with pytest.raises(SpeedRefusedError, match="mean KL of blurred against dense"):
        compare_speed(model, ids, DenseCaches(), BlurredCaches(), decoded=8, rounds=1, max_kl=1e-3)
    runs = []
    found = compare_speed(
        model, ids, DenseCaches(), BlurredCaches(), decoded=8, rounds=3, max_kl=1e9, progress=lambda: runs.append(1)
    )
    assert len(runs) == 6
    assert found["dense"]["prefill_seconds"] in found["dense"]["prefill_seconds_rounds"]
    assert found["ratio"]["decode"]["min"] <= found["ratio"]["decode"]["median"] <= found["ratio"]["decode"]["max"]
    json.dumps(found, allow_nan=False)


def test_the_environment_is_plain_data():
    found = environment(torch.device("cpu"))
    assert found["cores"] >= 1
    assert found["gpu"] is None
    assert found["torch"] == torch.__version__
    json.dumps(found, allow_nan=False)


@pytest.mark.real_model
def test_the_default_model_finds_needles_on_either_cache(default_model):
    model, tokenizer = default_model
    before = model.config._attn_implementation
    contexts = build_contexts(tokenizer, TEXT, "single", 500, 2)
    try:
        dense, ours = retrieve(model, tokenizer, contexts, [DenseCaches(), HiSparseCaches()])
    finally:
        model.set_attn_implementation(before)
    assert dense.correct == 2, dense.answers
    assert ours.correct == 2, ours.answers
    assert all(report["tokens"]["set_aside"] > 0 for report in ours.reports)
