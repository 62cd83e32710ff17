"""Asks the needle suite on several caches and compares them with the dense one, question by question."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hisparse.errors import InputError
from hisparse.evaluate.caches import CacheFactory, feed
from hisparse.evaluate.needles import WORDING, NeedleContext, Wording, prompt_parts
from hisparse.evaluate.stats import paired_interval, wilson

_MAX_ANSWER = 12  # tokens: a line break or a colon, then five digits, each of which may be a token


@dataclass(frozen=True)
class Answer:
    """One question on one cache. `text` is what was decoded after the primer."""

    context: int
    key: str
    depth: float
    value: str
    text: str

    @property
    def correct(self) -> bool:
        """The first whole number in the text is the value, digit for digit."""
        found = re.search(r"\d+", self.text)
        return found is not None and found.group() == self.value


@dataclass(frozen=True)
class Retrieval:
    """All answers of one cache kind on one suite, in the same order for every kind, and what its caches held."""

    name: str
    answers: tuple[Answer, ...]
    reports: tuple[dict[str, Any], ...]
    seconds: float

    @property
    def correct(self) -> int:
        return sum(answer.correct for answer in self.answers)

    def to_json(self, dense: Retrieval | None = None) -> dict[str, Any]:
        """Accuracy with its Wilson interval; with `dense`, what was lost and gained against it on the same prompts."""
        n = len(self.answers)
        capacities = [float(report["capacity"]) for report in self.reports]
        data: dict[str, Any] = {
            "correct": self.correct,
            "questions": n,
            "accuracy": self.correct / n,
            "accuracy_95": list(wilson(self.correct, n)),
            "capacity_mean": sum(capacities) / len(capacities),
            "seconds": self.seconds,
            "wrong": [
                {"context": a.context, "depth": round(a.depth, 3), "value": a.value, "answer": a.text}
                for a in self.answers
                if not a.correct
            ],
        }
        if dense is not None:
            data["against_dense"] = compare(self, dense)
        return data


def compare(ours: Retrieval, dense: Retrieval) -> dict[str, Any]:
    """Paired: questions lost and gained, relative accuracy, and the accuracy difference with its interval."""
    pairs = list(zip(ours.answers, dense.answers, strict=True))
    if any((a.context, a.key) != (b.context, b.key) for a, b in pairs):
        raise InputError(f"{ours.name} and {dense.name} answered different questions; run them on the same contexts")
    groups: dict[int, list[float]] = {}
    for a, b in pairs:
        groups.setdefault(a.context, []).append(float(a.correct) - float(b.correct))
    return {
        "lost": sum(b.correct and not a.correct for a, b in pairs),
        "gained": sum(a.correct and not b.correct for a, b in pairs),
        "relative_accuracy": ours.correct / dense.correct if dense.correct else None,
        "difference": (ours.correct - dense.correct) / len(pairs),
        "difference_95": list(paired_interval(list(groups.values()))),
    }


def ask(model: Any, tokenizer: Any, cache: Any, question: list[int]) -> str:
    """Greedy answer after `question` (token ids), appended to `cache`; stops when a number is complete."""
    ids = torch.tensor([question], dtype=torch.int64, device=model.device)
    answer: list[int] = []
    text = ""
    while len(answer) < _MAX_ANSWER:
        token = int(feed(model, cache, ids)[-1].argmax())
        answer.append(token)
        text = tokenizer.decode(answer, skip_special_tokens=True)
        if token in _end_tokens(model) or re.search(r"\d\D", text):
            break
        ids = torch.tensor([[token]], dtype=torch.int64, device=model.device)
    return text


def _end_tokens(model: Any) -> set[int]:
    end = model.generation_config.eos_token_id
    return set() if end is None else {end} if isinstance(end, int) else set(end)


def retrieve(
    model: Any,
    tokenizer: Any,
    contexts: Sequence[NeedleContext],
    factories: Sequence[CacheFactory],
    *,
    chunk: int | None = None,
    wording: Wording = WORDING,
    progress: Callable[[], None] = lambda: None,
) -> list[Retrieval]:
    """Ask every question of every context on every kind of cache; one :class:`Retrieval` a factory, in their order.

    A context is prefilled once a kind (in pieces of `chunk` tokens, if given), then each question is asked on a fork of
    that cache. `progress` is called after each context and kind.
    """
    if not contexts or not factories:
        raise InputError(f"{len(contexts)} contexts on {len(factories)} kinds of cache: give at least one of each")
    answers: list[list[Answer]] = [[] for _ in factories]
    reports: list[list[dict[str, Any]]] = [[] for _ in factories]
    seconds = [0.0] * len(factories)
    for index, context in enumerate(contexts):
        document, _ = prompt_parts(tokenizer, context.document, wording=wording)
        ids = torch.tensor([document], dtype=torch.int64, device=model.device)
        for which, factory in enumerate(factories):
            start = time.perf_counter()
            cache = factory.new(model)
            feed(model, cache, ids, chunk=chunk)
            reports[which].append(factory.report(cache))
            for needle in context.needles:
                _, question = prompt_parts(tokenizer, context.document, needle.key, wording)
                last = needle is context.needles[-1]
                text = ask(model, tokenizer, cache if last else factory.fork(cache), question)
                answers[which].append(Answer(index, needle.key, needle.depth, needle.value, text))
            seconds[which] += time.perf_counter() - start
            progress()
    return [
        Retrieval(factory.name, tuple(answers[i]), tuple(reports[i]), seconds[i]) for i, factory in enumerate(factories)
    ]
