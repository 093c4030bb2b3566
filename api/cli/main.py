"""The ``chairlift`` command: runs one subcommand.

NOTE: this module imports nothing slow, and a subcommand's module only if it is needed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, NamedTuple

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.server.standard_streams import ending_with_output, replace_unencodable

EXIT_INTERRUPTED = 130


class _Command(NamedTuple):
    """A subcommand. Its module has ``add_arguments(parser)`` and ``run(options)``.

    Ctrl-C ends it at once. One that has more to do restores Python's handler after its imports.
    """

    module: str
    help: str


COMMANDS = {
    "serve": _Command("chairlift.api.cli.serve", "serve models over OpenAI's and other APIs"),
    "bench": _Command("chairlift.loadtest.cli", "load-test a server and check its replies"),
    "chat": _Command("chairlift.api.cli.chat", "talk to a running server in the terminal"),
    "models": _Command("chairlift.api.cli.models", "list the models on disk"),
    "doctor": _Command(
        "chairlift.api.cli.doctor", "check whether this machine can serve, and how fast"
    ),
    "cluster": _Command("chairlift.api.cli.cluster", "deploy models to a Ray cluster"),
    "fetch": _Command("chairlift.api.cli.fetch", "download a model and verify its checksums"),
    "completion": _Command("chairlift.api.cli.completion", "print a shell's completion script"),
}


class _Version(argparse.Action):
    """Prints the version. Reading it takes too long to do it for each command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from chairlift.api.http.version import VERSION

        print(f"chairlift {VERSION}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code, which is 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    replace_unencodable()
    try:
        with _ended_by_ctrl_c():
            return ending_with_output(lambda: _run(arguments))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Lets Ctrl-C end the process at once, without an exception.

    An import can lose an exception, or leave a library half imported, which later crashes. Only the
    main thread has handlers of signals; in another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["serve"]:
        # Before its module, which takes tenths of a second to import: a process manager may stop
        # the server meanwhile.
        from chairlift.api.server import signals

        signals.before_loop()
    options = build_parser(arguments[:1], arguments[1:]).parse_args(arguments)
    exit_code: int = options.run(options)
    return exit_code


def build_parser(
    complete: Container[str], arguments: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Builds the parser of the command and its subcommands.

    A subcommand gets its flags only if it is in ``complete``, because its module may be slow to
    import. Its options contain ``parser``, the subcommand's, and ``arguments``, as given here.
    """
    parser = CommandParser(
        prog="chairlift",
        description="Serves language models to many clients in continuous batches.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar=f"{{{','.join(COMMANDS)}}}")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help)
        if name in complete:
            module = import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run, parser=subparser, arguments=arguments)
    return parser
