"""The interface of a scenario and its result."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Check(NamedTuple):
    """A condition that must hold, and the measurement."""

    what: str
    passed: bool
    found: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a scenario: ``figures`` for the JSON output, ``lines`` for a reader."""

    figures: Mapping[str, Any]
    lines: list[str]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A subcommand: ``run`` gets the model's path and the parsed flags.

    It raises a ``LoadTestError`` if the server does not come so far that it could be tried.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Path, argparse.Namespace], Outcome]
