"""Facts hidden in a long text and asked for afterwards: the retrieval suite's contexts and prompts.

`single` hides one fact in a context, `multi_key` several of one form, each of which is asked for while the others
distract (C.-P. Hsieh et al., RULER, 2024). A context is stored before any question on it is known, so what a cache
leaves out was left out blindly, and all questions on a context share one prefill.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hisparse.errors import InputError
from hisparse.evaluate.texts import sentences

Kind = Literal["single", "multi_key"]
KINDS: tuple[Kind, ...] = ("single", "multi_key")

_DIGITS = 5
_MARK = "\x02"  # stands for the end of the document while the chat template is filled in


@dataclass(frozen=True)
class Wording:
    """How a fact is stated and asked for. `fact`, `question` and `primer` are templates over `key` (and `value`)."""

    intro: str
    keys: tuple[str, ...]
    fact: str
    question: str
    primer: str


# Chosen on the default model's dense cache alone, at 2 000 tokens with 4 keys: of seven wordings this one scored
# highest (12 of 16; the next ones 20 of 32 and 10 of 16, so by chance perhaps). The key stands right before its value.
WORDING = Wording(
    intro="Read the following text. Some facts are hidden in it; remember them.\n\n",
    keys=(
        *("Alice", "Bob", "Carol", "David", "Emily", "Frank", "Grace", "Henry", "Irene", "Jack"),
        *("Karen", "Louis", "Maria", "Nathan", "Olivia", "Peter", "Rachel", "Simon", "Teresa", "Victor"),
    ),
    fact="Note this: {key} = {value}.",
    question="What does {key} equal?",
    primer="{key} =",
)


@dataclass(frozen=True)
class Needle:
    """One hidden fact; `depth` in [0, 1] is where in the hay it lies (0: before the first sentence)."""

    key: str
    value: str
    depth: float


@dataclass(frozen=True)
class NeedleContext:
    """A document with facts in it, in the order in which they occur. `tokens`: of the document alone."""

    kind: Kind
    document: str
    needles: tuple[Needle, ...]
    tokens: int


def build_contexts(
    tokenizer: Any,
    text: str,
    kind: Kind,
    tokens: int,
    count: int,
    *,
    needles: int = 4,
    seed: int = 0,
    depths: tuple[float, float] = (0.02, 0.92),
    wording: Wording = WORDING,
) -> list[NeedleContext]:
    """`count` contexts of at most `tokens` tokens (short by less than one sentence), the same for the same arguments.

    The hay is running text from another place in `text` for each context. `single` contexts walk evenly through
    `depths`; the `needles` facts of a `multi_key` context share `depths` between them, each at random within its part.
    The default leaves out the last 8 %, which a cache with a dense tail keeps anyway.
    Raises InputError for counts, depths or lengths that cannot work.
    """
    low, high = depths
    facts = needles if kind == "multi_key" else 1
    if kind not in KINDS:
        raise InputError(f"unknown needle suite {kind!r}; choose from {', '.join(KINDS)}")
    if count < 1 or not 1 <= facts <= len(wording.keys):
        raise InputError(f"{count} contexts of {facts} needles: give at least one of each, at most {len(wording.keys)}")
    if not 0 <= low <= high <= 1:
        raise InputError(f"depths {low} to {high}: give two numbers from 0 to 1, the smaller first")
    hay = sentences(text)
    sizes = [len(ids) for ids in tokenizer([" " + line for line in hay], add_special_tokens=False).input_ids]
    contexts = []
    for index in range(count):
        rng = random.Random(f"{seed} {kind} {tokens} {index}")
        keys = rng.sample(wording.keys, facts)
        width = (high - low) / facts
        drawn = [low + width * (part + rng.random()) for part in range(facts)]
        if kind == "single":
            drawn = [low + (high - low) * (index + 0.5) / count]
        hidden = tuple(Needle(key, _value(rng), depth) for key, depth in zip(keys, drawn, strict=True))
        stated = [wording.fact.format(key=needle.key, value=needle.value) for needle in hidden]
        taken = _take(sizes, tokens - sum(_length(tokenizer, " " + fact) for fact in stated), rng)
        lines = [hay[i % len(hay)] for i in taken]
        contexts.append(_hide(tokenizer, kind, lines, hidden, stated, tokens))
    return contexts


def _value(rng: random.Random) -> str:
    return str(rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS))


def _take(sizes: Sequence[int], budget: int, rng: random.Random) -> range:
    """Consecutive sentences of at most `budget` tokens from a random place; past the end the text starts again."""
    start = rng.randrange(len(sizes))
    stop, used = start, 0
    while used + sizes[stop % len(sizes)] <= budget and stop - start < len(sizes):
        used += sizes[stop % len(sizes)]
        stop += 1
    return range(start, stop)


def _hide(
    tokenizer: Any, kind: Kind, lines: list[str], hidden: tuple[Needle, ...], stated: list[str], tokens: int
) -> NeedleContext:
    """Insert the facts between sentences; sentences joined may take a token more than alone, so drop until it fits."""
    while lines:
        mixed = list(lines)
        for needle, fact in sorted(zip(hidden, stated, strict=True), key=lambda pair: -pair[0].depth):
            mixed.insert(round(needle.depth * len(lines)), fact)
        document = " ".join(mixed)
        length = _length(tokenizer, document)
        if length <= tokens:
            return NeedleContext(kind, document, hidden, length)
        lines = lines[:-1]
    raise InputError(f"{len(hidden)} facts and a sentence do not fit in {tokens} tokens; ask for longer contexts")


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def prompt_parts(
    tokenizer: Any, document: str, key: str | None = None, wording: Wording = WORDING
) -> tuple[list[int], list[int]]:
    """Token ids of the document's part and of the question's part of a prompt.

    Both are one user turn of the tokenizer's chat template (plain text where it has none), cut after the document, with
    the answer begun by `wording.primer`. The first part does not depend on `key`. With `key` None the second is empty.
    """
    question = "" if key is None else wording.question.format(key=key)
    content = f"{wording.intro}{document}{_MARK}\n\n{question}"
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": content}]
        filled = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        begun = False
    else:
        filled, begun = content + "\n\n", True
    if filled.count(_MARK) != 1:
        raise InputError("this tokenizer's chat template does not show the user's text once, as it stands; use another")
    before, after = filled.split(_MARK)
    first = list(tokenizer(before, add_special_tokens=begun).input_ids)
    if key is None:
        return first, []
    after += wording.primer.format(key=key)
    return first, list(tokenizer(after, add_special_tokens=False).input_ids)
