"""What is said on stderr while something takes long: it comes and goes at a terminal, elsewhere it is a plain line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hisparse.models.fetch import say


@contextmanager
def phase(text: str = "") -> Iterator[Callable[[str], None]]:
    """Say `text` at once; the function that this gives says what follows it."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_interactive:
        with console.status(text) as status:
            yield status.update
    else:
        if text:
            say(text)
        yield say


def announce(console: Any, text: str) -> None:
    """Say `text` where rich's `console` does not draw the progress bar that follows until it is full."""
    if not console.is_interactive:
        say(text)
