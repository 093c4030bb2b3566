"""Flags that are other names of a flag, as users of other servers know them."""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Sequence
from typing import Any


class AliasAction(argparse.Action):
    """Another name of the flag ``of``; ``config_sources.resolve`` turns it into that flag.

    Args:
        of: the flag, without its dashes. None: the flag is accepted and has no effect.
        translate: makes the value of ``of`` from this flag's value.
        agrees: whether a value for ``of``, made by ``translate``, and one that was given by another
            name mean the same.
        is_switch: the flag takes no value, and ``--no-NAME`` is its opposite.
        is_flag_only: the name is a flag, but no key of a file and no variable.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        of: str | None,
        translate: Callable[[Any], Any] | None = None,
        agrees: Callable[[Any, Any], bool] = operator.eq,
        is_switch: bool = False,
        is_flag_only: bool = False,
        **options: Any,
    ) -> None:
        if is_switch:
            options["nargs"] = 0
            option_strings = [*option_strings, *(f"--no-{name[2:]}" for name in option_strings)]
        super().__init__(option_strings, dest, **options)
        self.of = of
        self.agrees = agrees
        self.is_flag_only = is_flag_only
        self._translate = translate

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Stores the value. Lists of a repeated flag are joined."""
        if self.nargs == 0:
            values = not (option_string or "").startswith("--no-")
        if isinstance(values, list):
            values = [*(getattr(namespace, self.dest) or ()), *values]
        setattr(namespace, self.dest, values)

    def translated(self, value: Any) -> Any:
        """The value of ``of`` that stands for this flag's ``value``."""
        return value if self._translate is None else self._translate(value)
