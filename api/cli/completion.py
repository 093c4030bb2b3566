"""``chairlift completion``: a script by which a shell completes commands and flags."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.description = "Prints a completion script, as for eval in a shell's start-up file."
    parser.add_argument("shell", choices=SHELLS)


def run(options: argparse.Namespace) -> int:
    """Prints the script; returns 0."""
    # shtab writes a script once; others, like argcomplete, start Python at each press of the key.
    import shtab

    from chairlift.api.cli.main import COMMANDS, build_parser

    print(shtab.complete(build_parser(COMMANDS), options.shell))
    return 0
