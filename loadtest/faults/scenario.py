"""The interface of a scenario and its result."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Check(NamedTuple):
    """A condition that must hold.

    Attributes:
        what: the condition.
        passed: whether it holds.
        found: the measurement.
    """

    what: str
    passed: bool
    found: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a scenario.

    Attributes:
        figures: the measurements for the JSON output.
        lines: further text for a reader.
        checks: the conditions.
    """

    figures: Mapping[str, Any]
    lines: list[str]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A subcommand.

    Attributes:
        name: its name.
        help: one line of help.
        add_arguments: adds its flags to a parser.
        run: runs it with the model's path and the parsed flags; raises ``LoadTestError`` if the
            server could not be tested.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Path, argparse.Namespace], Outcome]
