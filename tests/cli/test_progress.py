"""What is said while something takes long: once and plainly in a file, and not left behind at a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from hisparse.cli import progress


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a person sees, who sits at a terminal."""
    screen = io.StringIO()

    def console(**_: Any) -> Console:
        return Console(file=screen, force_terminal=True, force_interactive=True, width=60)

    monkeypatch.setattr("rich.console.Console", console)
    return screen


def test_without_a_terminal_each_phase_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.phase("First ...") as say:
        assert capsys.readouterr().err == "First ...\n"
        say("Second ...")
        assert capsys.readouterr().err == "Second ...\n"
    with progress.phase():
        pass
    progress.announce(Console(stderr=True), "12 windows ...")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "12 windows ...\n")


def test_at_a_terminal_a_phase_comes_and_goes(terminal: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.phase("First ...") as say:
        say("Second ...")
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[2K") > shown.index("Second ...")  # the line is erased
    progress.announce(Console(force_terminal=True, force_interactive=True), "12 windows ...")
    assert "12 windows" not in capsys.readouterr().err


@pytest.mark.parametrize("closes", [False, True])
def test_an_error_leaves_the_phase(closes: bool, capsys: pytest.CaptureFixture[str]) -> None:
    error = KeyboardInterrupt if closes else ValueError
    with pytest.raises(error), progress.phase("First ..."):
        raise error
    assert capsys.readouterr().err == "First ...\n"
