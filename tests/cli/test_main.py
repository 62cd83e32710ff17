"""The entry point: every error is one line and exit code 2, and help is quick because nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hisparse.cli import main
from hisparse.errors import InputError


def one_line(err: str) -> bool:
    lines = err.strip().splitlines()
    return len(lines) == 1 and lines[0].startswith("error: ") and "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom hisparse.cli.main import run\n"
        f"try:\n    run({arguments!r})\nexcept SystemExit as left:\n    assert not left.code, left.code\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'scipy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "hisparse" in done.stdout.lower()


def test_help_lists_every_command_that_can_be_called(cli: Any) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    names = main.LazyGroup(name="x").list_commands(None)
    assert {"demo", "generate", "inspect-kv-cache"} <= set(names)
    for name in names:
        assert name in out
        assert main.load_command(name).name == name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "nonsense"),
        (["generate"], "--prompt-file"),
        (["generate", "--nonsense"], "--nonsense"),
        (["generate", "-f", "x", "-n", "0"], "--max-new-tokens"),
        (["generate", "-f", "x", "-n", "many"], "--max-new-tokens"),
        (["generate", "-f", "x", "-t", "-1"], "--temperature"),
        (["inspect-kv-cache"], "--prompt-file"),
    ],
)
def test_wrong_usage_is_one_line_with_a_way_on(cli: Any, arguments: list[str], says: str) -> None:
    code, out, err = cli(*arguments)
    assert code == 2
    assert one_line(err)
    assert says in err
    assert "--help" in err
    assert out.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "-f", "x", "-n", "0"], "'-n': 0: "),
        (["generate", "-f", "x", "-n", "many"], "many"),
        (["generate", "-f", "x", "-t", "inf"], "'-t': inf: "),
        (["generate", "-f", "x", "-t", "nan"], "nan"),
        (["generate", "-f", "x", "-t", "1e-320"], "--temperature 1e-320: too small to divide by"),
        (["generate", "-f", "x", "--seed", "9" * 26], f"--seed {'9' * 26}: "),
        (["distill", "--corpus", "x", "-o", "y.safetensors", "--seed", "9" * 26], f"--seed {'9' * 26}: "),
        (["calibrate", "--corpus", "x", "-o", "y.safetensors", "--span", "1" + "0" * 23], f"--span 1{'0' * 23}: "),
        (["calibrate", "--corpus", "x", "-o", "y.safetensors", "--windows", "abc"], "abc"),
        (["bench", "quality", "--chunk", "9" * 21], f"--chunk {'9' * 21}: "),
        (["bench", "quality", "--threads", "9" * 14], "9" * 14),
        (["bench", "quality", "--suite", "foo"], "foo"),
        (["bench", "decode", "--context", "1024", "--context", "9" * 26], f"--context {'9' * 26}: "),
    ],
)
def test_a_value_that_no_option_can_have_is_named(cli: Any, arguments: list[str], says: str) -> None:
    code, out, err = cli(*arguments)
    assert code == 2
    assert one_line(err)
    assert says in err
    assert out == ""


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_no_command_at_all_shows_the_help_and_no_error(cli: Any, arguments: list[str]) -> None:
    code, out, err = cli(*arguments)
    assert code == 2
    assert "Usage" in out + err
    assert "error:" not in out + err


def test_what_memory_cannot_hold_is_one_line_with_the_size_and_the_command(cli: Any) -> None:
    for tokens in (99999999999, 2**63 - 1):
        code, _, err = cli("bench", "tlif", "--context", tokens)
        assert code == 2
        assert one_line(err)
        assert f"`hisparse bench tlif --context {tokens}`" in err
        assert "ask for fewer tokens" in err


def broken(error: BaseException) -> Any:
    def function() -> None:
        """Fails."""
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (InputError("this is\n  wrong; do that"), 2, "error: this is wrong; do that\n"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            MemoryError("Unable to allocate 9 TiB"),
            2,
            "error: not enough memory for `hisparse demo` (Unable to allocate",
        ),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(
    cli: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, says: str
) -> None:
    monkeypatch.setattr("hisparse.cli.demo.demo", broken(error))
    got, _, err = cli("demo")
    assert got == code
    assert says in err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse.cli.demo.demo", broken(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main.run(["demo"])


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    code = "from hisparse.cli.main import run; run(['generate', '--help'])"
    command = f'"{sys.executable}" -c "{code}" | head -c 1 > {tmp_path / "out"}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_warnings_for_users_are_one_line_and_others_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    main._show_warning("look\nhere", UserWarning, "x.py", 1)
    main._show_warning("old", DeprecationWarning, "x.py", 1)
    assert capsys.readouterr().err == "warning: look here\n"
