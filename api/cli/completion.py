"""``chairlift completion``: prints a script that completes commands and flags in a shell."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the shell's name."""
    parser.description = (
        "Prints a completion script; evaluate it in the shell's start-up file with eval."
    )
    parser.add_argument("shell", choices=SHELLS)


def run(options: argparse.Namespace) -> int:
    """Prints the script; returns 0."""
    # shtab writes a static script; argcomplete would start Python each time Tab is pressed.
    import shtab

    from chairlift.api.cli.main import COMMANDS, build_parser

    print(shtab.complete(build_parser(COMMANDS), options.shell))
    return 0
