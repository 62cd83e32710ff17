"""How a document and a question become tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.cli.session import build_prompt
from hisparse.errors import InputError

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>\0"), min_size=1, max_size=60).filter(str.strip)


@given(WORDS, WORDS)
def test_document_and_question_together_are_the_rendered_chat(chat: Any, document: str, question: str) -> None:
    prompt = build_prompt(chat, document, question)
    text = f"<user>{document.strip()}\n\n{question.strip()}</s><assistant>"
    assert prompt.ids[0].tolist() == chat(text).input_ids
    assert prompt.length == prompt.document.shape[1] + prompt.question.shape[1]


@given(WORDS, WORDS, WORDS)
def test_the_documents_part_does_not_depend_on_the_question(
    chat: Any, plain: Any, document: str, first: str, second: str
) -> None:
    for tokenizer in (chat, plain):
        a, b = (build_prompt(tokenizer, document, question).document.tolist() for question in (first, second))
        assert a == b


@given(WORDS)
def test_without_a_question_the_text_is_taken_as_it_is(chat: Any, plain: Any, document: str) -> None:
    for tokenizer in (chat, plain):
        prompt = build_prompt(tokenizer, document)
        assert prompt.ids[0].tolist() == tokenizer(document).input_ids
        assert prompt.question.shape == (1, 0)


def test_a_template_that_rewrites_the_document_is_not_used(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}")
    prompt = build_prompt(tokenizer, "some words", "why?")
    assert tokenizer.decode(prompt.ids[0]) == "some words\n\nQuestion: why?\nAnswer:"


@pytest.mark.parametrize(("document", "question"), [("", None), (" \n", "why?"), ("text", " ")])
def test_empty_parts_are_refused(chat: Any, document: str, question: str | None) -> None:
    with pytest.raises(InputError, match="empty"):
        build_prompt(chat, document, question)
