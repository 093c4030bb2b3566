"""The flags of ``serve`` that say when the engine process counts as lost."""

from __future__ import annotations

import argparse

from chairlift.api.cli.flags import positive_seconds
from chairlift.engine.client.supervision import Supervision

_DEFAULTS = Supervision()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them, in a group of their own."""
    add = parser.add_argument_group("engine process").add_argument
    add(
        "--engine-timeout",
        type=positive_seconds,
        default=_DEFAULTS.timeout,
        metavar="S",
        help="an engine that has work and ends no step for so long is killed, and its requests go "
        "on in another; must be longer than any step takes (default: %(default)g)",
    )
    add(
        "--engine-start-attempts",
        type=_attempts,
        default=_DEFAULTS.attempts,
        metavar="N",
        help="the server ends with code 1 when the engine has failed to start so many times in a "
        "row (default: %(default)s)",
    )


def supervision(options: argparse.Namespace) -> Supervision:
    """What the flags say."""
    return Supervision(options.engine_timeout, options.engine_start_attempts)


def _attempts(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 100):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100")
    return int(text)
