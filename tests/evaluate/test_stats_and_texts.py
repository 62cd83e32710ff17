"""Intervals against scipy and enumeration; sentences, windows and needle contexts by their invariants."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from evaluate_tools import byte_tokenizer, prose
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from hisparse.errors import InputError
from hisparse.evaluate.needles import WORDING, build_contexts, prompt_parts
from hisparse.evaluate.stats import paired_interval, wilson
from hisparse.evaluate.texts import sentences, windows

TOKENIZER = byte_tokenizer()
TEXT = prose()


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_wilson_interval_is_scipys(counts, confidence):
    k, n = counts
    expected = binomtest(k, n).proportion_ci(confidence, method="wilson")
    assert wilson(k, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("k", "n"), [(0, 0), (2, 1), (-1, 5)])
def test_wilson_refuses_impossible_counts(k, n):
    with pytest.raises(InputError, match=f"{k} successes of {n}"):
        wilson(k, n)


def test_paired_interval_is_the_exact_bootstrap_of_contexts():
    groups = [[-1.0, 0.0, 0.0], [0.0], [1.0, 0.0], [-1.0]]
    means = []
    for picks in itertools.product(groups, repeat=4):
        values = [value for group in picks for value in group]
        means.append(sum(values) / len(values))
    low, high = paired_interval(groups, draws=200_000)
    assert low == pytest.approx(np.quantile(means, 0.025), abs=0.02)
    assert high == pytest.approx(np.quantile(means, 0.975), abs=0.02)


def test_paired_interval_of_no_difference_is_a_point():
    assert paired_interval([[0.0, 0.0], [0.0]]) == (0.0, 0.0)
    with pytest.raises(InputError, match="no paired answers"):
        paired_interval([[]])


def test_sentences_end_at_marks_and_paragraphs():
    text = 'He said: "This is rather long." Then he\nleft the house in haste!\n\nA heading\n\nNo mark but long enough'
    assert sentences(text) == [
        'He said: "This is rather long."',
        "Then he left the house in haste!",
        "No mark but long enough",
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "Short. Bits. Only."])
def test_text_without_sentences_is_refused(text):
    with pytest.raises(InputError, match="without a sentence"):
        sentences(text)


@settings(deadline=None)
@given(st.text(alphabet="ab .!?\n\"'", max_size=300))
def test_sentences_lose_nothing_but_short_ones(text):
    try:
        found = sentences(text)
    except InputError:
        found = []
    joined = " ".join(text.split())
    at = 0
    for sentence in found:
        assert len(sentence) >= 20
        at = joined.index(sentence, at) + len(sentence)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 900), st.integers(1, 7))
def test_windows_are_cuts_of_the_text_from_start_to_end(tokens, count):
    text = TEXT[:1000]
    ids = TOKENIZER(text).input_ids
    cut = windows(TOKENIZER, text, tokens, count)
    assert len(cut) == count
    for window in cut:
        assert window.shape == (1, tokens)
        assert any(ids[i : i + tokens] == window[0].tolist() for i in range(len(ids) - tokens + 1))
    assert cut[0][0].tolist() == ids[:tokens]
    if count > 1:
        assert cut[-1][0].tolist() == ids[-tokens:]


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(InputError, match="a window needs 50"):
        windows(TOKENIZER, "short", 50, 1)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["single", "multi_key"]),
    st.integers(500, 3000),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_contexts_hold_each_fact_once_in_order_and_fit(kind, tokens, count, needles, seed):
    contexts = build_contexts(TOKENIZER, TEXT, kind, tokens, count, needles=needles, seed=seed)
    assert contexts == build_contexts(TOKENIZER, TEXT, kind, tokens, count, needles=needles, seed=seed)
    longest = max(len(line) for line in sentences(TEXT)) + 1
    for context in contexts:
        assert len(context.needles) == (1 if kind == "single" else needles)
        stated = re.findall(r"Note this: (\w+) = (\d{5})\.", context.document)
        assert stated == [(needle.key, needle.value) for needle in context.needles]
        assert context.tokens == len(TOKENIZER(context.document).input_ids)
        assert tokens - longest - 2 <= context.tokens <= tokens


def test_needles_lie_at_their_depth():
    contexts = build_contexts(TOKENIZER, TEXT, "single", 3000, 5, depths=(0.1, 0.9))
    depths = [context.needles[0].depth for context in contexts]
    assert depths == pytest.approx([0.18, 0.34, 0.5, 0.66, 0.82])
    for context, depth in zip(contexts, depths, strict=True):
        found = context.document.index(WORDING.fact.split("{")[0]) / len(context.document)
        assert found == pytest.approx(depth, abs=0.04)


def test_other_seeds_give_other_contexts():
    first, second = (build_contexts(TOKENIZER, TEXT, "single", 800, 1, seed=seed)[0] for seed in (0, 1))
    assert first.document != second.document
    assert first.needles != second.needles


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 60}, "do not fit in 60 tokens"),
        ({"count": 0}, "0 contexts"),
        ({"kind": "multi_key", "needles": 99}, "99 needles"),
        ({"depths": (0.5, 0.1)}, r"depths 0\.5 to 0\.1"),
        ({"kind": "many"}, "unknown needle suite 'many'"),
    ],
)
def test_contexts_that_cannot_be_made_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        build_contexts(TOKENIZER, TEXT, **{"kind": "single", "tokens": 800, "count": 1, **arguments})


@pytest.mark.parametrize("template", ["chat", None])
def test_the_documents_part_does_not_depend_on_the_question(template):
    tokenizer = TOKENIZER if template else byte_tokenizer(None)
    blind, nothing = prompt_parts(tokenizer, "A document.")
    assert nothing == []
    for key in ("Alice", "Simon"):
        document, question = prompt_parts(tokenizer, "A document.", key)
        assert document == blind
        assert tokenizer.decode(document).endswith("A document.")
        assert tokenizer.decode(question).endswith(f"{key} =")
        assert WORDING.question.format(key=key) in tokenizer.decode(question)


def test_a_template_that_hides_the_users_text_is_refused():
    with pytest.raises(InputError, match="chat template"):
        prompt_parts(byte_tokenizer("constant"), "A document.", "Alice")
