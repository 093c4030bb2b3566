"""Two helps for a command with many flags: the most common ones, and all."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from chairlift.api.cli.arguments.parser import CommandParser


class _HelpAll(argparse.Action):
    """Prints all flags, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(_full_help(parser), end="")
        parser.exit()


def add_help_all(parser: argparse.ArgumentParser, common: Sequence[str]) -> None:
    """Adds ``--help-all``, and reduces the help of a ``CommandParser`` to the flags ``common``."""
    parser.add_argument(
        "--help-all",
        action=_HelpAll,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show all flags and exit",
    )
    if isinstance(parser, CommandParser):
        parser.short_help = lambda: _short_help(parser, common)


def _full_help(parser: argparse.ArgumentParser) -> str:
    return argparse.ArgumentParser.format_help(parser)


def _short_help(parser: argparse.ArgumentParser, common: Sequence[str]) -> str:
    # NOTE: argparse has no public way to format some of the flags.
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, (), ())
    formatter.add_text(parser.description)
    for title, actions in (
        ("arguments", [action for action in parser._actions if not action.option_strings]),
        ("common flags", [parser._option_string_actions[name] for name in common]),
    ):
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    count = sum(bool(action.option_strings) for action in parser._actions)
    formatter.add_text(f"--help-all shows all {count} flags, in groups.")
    return formatter.format_help()
