"""The argument parser of every command: exact flags, and errors that repeat no values."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

_NEEDS_NO_VALUE = re.compile(r"ignored explicit argument .*", re.DOTALL)


class CommandParser(argparse.ArgumentParser):
    """Accepts no abbreviations, and names the nearest flag for an unknown one.

    argparse's own errors repeat arguments that no flag has claimed. After a misspelt flag, such an
    argument may be an API key, so these errors name flags only.
    """

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)
        # Makes the text of --help, if that is less than all flags.
        self.short_help: Callable[[], str] | None = None

    def format_help(self) -> str:
        """The text of ``--help``."""
        return super().format_help() if self.short_help is None else self.short_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, but unknown arguments are an error here, where the flags are known."""
        words = list(sys.argv[1:] if args is None else args)
        # Before argparse looks: it would complain about a value that it takes for another argument.
        if flags := list(self._unknown_flags(words)):
            known = [name for name in self._option_string_actions if name.startswith("--")]
            self.error("; ".join(f"unknown flag {flag}{suggestion(flag, known)}" for flag in flags))
        options, unknown = super().parse_known_args(words, namespace)
        if any(word.startswith("-") and len(word) > 1 for word in unknown):
            self.error("unknown flag with one dash; the names of flags begin with two")
        if unknown:
            count = f"{len(unknown)} argument{'s' * (len(unknown) > 1)} too many"
            self.error(f"{count}; put a value with blanks in quotation marks{self._order()}")
        return options, []

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the error, and exits with code 2."""
        super().error(_NEEDS_NO_VALUE.sub("takes no value", message))

    def _order(self) -> str:
        """The end of an error for words too many: argparse takes a list's words in one place only.

        Those after a later flag are not added to the list: after a flag of one value they may be
        meant as further values of that flag.
        """
        lists = [each for each in self._get_positional_actions() if each.nargs in ("*", "+")]
        return "".join(f", and name every {each.metavar} before the flags" for each in lists)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # After an unknown flag, argparse takes the flag's value for the next positional argument.
        if not action.option_strings and action.choices and value not in action.choices:
            name = "command" if isinstance(action, argparse._SubParsersAction) else action.dest
            near, choices = suggestion(str(value), action.choices), ", ".join(action.choices)
            raise argparse.ArgumentError(None, f"unknown {name}{near} (one of {choices})")
        super()._check_value(action, value)

    def _unknown_flags(self, words: Sequence[str]) -> Iterator[str]:
        """The names of unknown flags, without values. A command's flags are its own parser's."""
        known, has_commands = self._option_string_actions, self._subparsers is not None
        for word in words:
            if word == "--" or (has_commands and not word.startswith("-")):
                return
            flag = word.partition("=")[0]
            # As for argparse, a word with a blank is a value.
            if flag.startswith("--") and " " not in word and flag not in known:
                yield flag


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error for an unknown ``name``: the nearest known one, or nothing."""
    # Without the dashes, which would make all flags alike.
    bare = {word.lstrip("-"): word for word in known}
    near = difflib.get_close_matches(name.lstrip("-"), list(bare), 1)
    return f"; did you mean {bare[near[0]]}?" if near else ""
