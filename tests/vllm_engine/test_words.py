"""The tables of options that `hisparse serve` reads words by are those of vLLM's own parser."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hisparse.cli.words import FLAGS, SEVERAL


def test_the_tables_are_those_of_vllms_parser() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags, several, others = set(), set(), set()
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        names = {name for name in action.option_strings if not name.startswith("--no-")}
        if action.nargs == 0:
            flags |= names
        elif action.nargs in ("+", "*"):
            several |= names
        elif action.nargs in (None, "?"):
            others |= names
        else:
            raise AssertionError(f"{names} takes {action.nargs} values")
    assert flags == FLAGS
    assert several == SEVERAL
    assert len(others) > 100
