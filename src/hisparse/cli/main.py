"""`hisparse`: the entry point, and what happens to errors.

A command's module is imported when the command is called, so that `hisparse --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import shlex
import sys
import warnings
from typing import Annotated, Any

import typer
import typer.core
import typer.main

import hisparse
from hisparse.errors import HiSparseError, InputError

# name: (module, function, line in --help); in the order of a newcomer's needs
COMMANDS = {
    "demo": ("demo", "demo", "Continue a book and find a fact in it, in a ninth of the KV memory."),
    "generate": ("generate", "generate", "Continue a text, or answer a question about it."),
    "inspect-kv-cache": (
        "inspect",
        "inspect_kv_cache",
        "Show what is kept of a text, by layer and tier, and draw the plan.",
    ),
    "plan-blocks": ("plan", "plan_blocks_command", "Plan the blocks of a text without running a model's attention."),
    "bench-quant-error": ("quant_error", "bench_quant_error", "Show the quantisation error by block, worst first."),
    "bench": ("bench", "bench_app", "Measure quality and speed beside the dense cache."),
    "distill": ("distill", "distill", "Train a TLIF for a model by self-distillation."),
    "serve": ("serve", "serve", "Serve a model over HTTP through vLLM."),
    "calibrate": ("calibrate", "calibrate", "Measure a model's channel statistics for quantisation."),
}

PASSES_ON = frozenset({"serve"})
"""Commands that hand options they do not know to another program."""


def _module(name: str) -> str:
    return f"hisparse.cli.{COMMANDS[name][0]}"


class LazyGroup(typer.core.TyperGroup):
    """A group that knows its commands' names and help lines, and imports one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if importlib.util.find_spec(_module(name)) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command that has its help line alone: what the list of commands needs."""
        return typer.core.TyperCommand(name=cmd_name, help=COMMANDS[cmd_name][2]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.list_commands(ctx):
            return args[0], load_command(args[0]), args[1:]
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Import a command's module and build its parser."""
    function = getattr(importlib.import_module(_module(name)), COMMANDS[name][1])
    if isinstance(function, typer.Typer):  # a group of commands
        group: Any = typer.main.get_command(function)
        group.name = name
        for command in group.commands.values():
            _check_numbers(command)
        return group
    single = typer.Typer(add_completion=False)
    settings: dict[str, Any] = {}
    if name in PASSES_ON:
        settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
    single.command(name, help=function.__doc__ or COMMANDS[name][2], context_settings=settings)(function)
    command = typer.main.get_command(single)
    _check_numbers(command)
    return command


def _check_numbers(command: Any) -> None:
    """Have every option of a command refuse numbers that no tensor library takes, beside the range of its own."""
    for parameter in command.params:
        parameter.callback = _checked(parameter.callback)


def _checked(then: Any) -> Any:
    def callback(ctx: Any, parameter: Any, value: Any) -> Any:
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int) and not -(2**63) <= number < 2**63:
                raise InputError(f"{parameter.opts[0]} {number}: give a whole number of at most 64 bits")
            if isinstance(number, float) and not math.isfinite(number):
                raise InputError(f"{parameter.opts[0]} {number}: give a finite number")
        return value if then is None else then(ctx, parameter, value)

    return callback


app = typer.Typer(
    cls=LazyGroup, add_completion=False, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hisparse {hisparse.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """HiSparse: long context in a ninth of the KV memory."""


def run(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process.

    Exit code 0 for success, 2 for an error that the user can repair (one line on stderr), 130 after Ctrl-C. Anything
    else is a bug and keeps its traceback.
    """
    warnings.showwarning = _show_warning
    # transformers' own chatter would bury ours; its warnings about offline use are repeated in our errors.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        code = app(args=arguments, prog_name="hisparse", standalone_mode=False)
    except HiSparseError as error:
        sys.exit(_fail(str(error)))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # the reader of our output has gone: `hisparse ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        # typer carries click's exception classes in its own package since 0.20, so they are known by what they can do.
        if reason := _out_of_memory(error):
            words = shlex.join(sys.argv[1:] if arguments is None else arguments)
            remedy = "ask for fewer tokens or a smaller --chunk, or use a machine with more"
            sys.exit(_fail(f"not enough memory for `hisparse {words}` ({reason}); {remedy}"))
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "hisparse")
        _name_value(error)
        reason = error.format_message().rstrip(".")
        # No command at all has shown the help already, and has no message.
        sys.exit(_fail(f"{reason}; see `{command} --help`") if reason else 2)
    if code == 130:  # typer turns Ctrl-C into this, click into Abort
        print("interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _name_value(error: Any) -> None:
    """Put the value that was given before an error's message where typer, which asks pydantic, leaves it out."""
    found = getattr(error.__cause__, "errors", None)
    if found is not None:
        message = error.message.removeprefix("Value error, ")
        error.message = f"{found()[0]['input']}: {message[:1].lower()}{message[1:]}"


def _out_of_memory(error: Exception) -> str | None:
    """What could not be allocated, in a line; None for any other error. PyTorch has no type of its own for it on a CPU,
    nor for sizes beyond any machine's."""
    text = " ".join(str(error).split())
    if size := re.search(r"you tried to allocate (\d+) bytes", text):
        return f"{int(size[1]):,} bytes in one piece"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return text[:160] or "an allocation failed"
    if isinstance(error, RuntimeError) and "Storage size calculation overflowed" in text:
        return "a tensor of more bytes than 64 bits can count"
    return None


def _fail(text: str) -> int:
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return 2


def _show_warning(message: Any, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
    """A warning meant for users in one line; those meant for programmers (deprecations and the like) not at all."""
    if category is UserWarning:
        print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
