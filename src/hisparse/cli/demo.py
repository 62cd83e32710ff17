"""`hisparse demo`: two things a newcomer wants to see, on a real book with the default model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hisparse.errors import InputError

if TYPE_CHECKING:
    from hisparse.config import HiSparseConfig

FACT = "The magic number of the castle kitchen is 58213."
QUESTION = "What is the magic number of the castle kitchen?"
ANSWER = "58213"


@dataclass(frozen=True)
class _Size:
    """Tokens of the two parts."""

    continued: int = 7525
    searched: int = 2000
    new: int = 64
    answer: int = 24


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the picture and the figures.")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="Continue a fifth of the text, for a first look.")] = False,
) -> None:
    """Continue a book and find a fact in it, in a ninth of the KV memory, beside the dense cache.

    Writes demo-plan.png (what is kept) and demo.json (all figures) to the folder.
    """
    from rich.console import Console

    from hisparse import books
    from hisparse.cli import inspect, session
    from hisparse.cli.generate import write_json

    console = Console(highlight=False)
    _make_folder(out)
    start = time.perf_counter()
    book = books.book()
    model, tokenizer = session.open_model("default", None, None)
    config = session.open_config(None)
    lengths = _Size(continued=1500, new=32) if quick else _Size()

    text = books.opening(book, tokenizer, lengths.continued)
    prompt = session.build_prompt(tokenizer, text, None, model.device)
    console.rule(f"1. {prompt.length} tokens of Hamlet, continued")
    console.print("...", *text.rstrip().splitlines()[-6:], sep="\n", style="dim", markup=False)
    first = session.complete(model, tokenizer, prompt, config, lengths.new, compare=True, stream=True, keep_plans=True)
    _report(console, first)
    picture = out / "demo-plan.png"
    inspect.draw(first.cache, picture)

    console.rule(f"2. A fact hidden in about {lengths.searched} tokens of it, asked for afterwards")
    second, found = _find_fact(model, tokenizer, book, config, lengths)
    _report(console, second)
    console.print(f"hidden: {FACT}")
    dense_found = ANSWER in second.to_json()["dense"]["text"]
    console.print(f"found: {_yes(found)}; with the dense cache: {_yes(dense_found)}")

    figures = {"continued": first.to_json(), "searched": {**second.to_json(), "found": found}}
    write_json(out / "demo.json", {**figures, "seconds": time.perf_counter() - start})
    console.rule("Done")
    console.print(f"{time.perf_counter() - start:.0f} s in all; figures in {out / 'demo.json'}, the plan in {picture}")
    console.print("Your own text: hisparse generate --prompt-file FILE --question 'What ...?' --compare-dense")


def hide(text: str, fact: str, depth: float) -> str:
    """`text` with `fact` as a paragraph of its own, at the last paragraph break before `depth` (0 to 1) of it."""
    cut = max(text.rfind("\n\n", 0, int(len(text) * depth)), 0)
    return f"{text[:cut]}\n\n{fact}{text[cut:]}"


def _find_fact(model: Any, tokenizer: Any, book: str, config: HiSparseConfig, lengths: _Size) -> tuple[Any, bool]:
    from hisparse import books
    from hisparse.cli import session

    # The chat template, the fact and the question take some of the tokens.
    document = hide(books.opening(book, tokenizer, lengths.searched - 80), FACT, 0.4)
    prompt = session.build_prompt(tokenizer, document, QUESTION, model.device)
    print(QUESTION, flush=True)
    result = session.complete(model, tokenizer, prompt, config, lengths.answer, compare=True, stream=True)
    return result, ANSWER in result.text


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _report(console: Any, result: Any) -> None:
    from hisparse.cli.generate import summary_table

    console.print()
    console.print(summary_table(result.to_json()))


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}; name a folder that can be written") from None
