"""What a scenario is, and what comes of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Check(NamedTuple):
    """Something that has to hold, and what was found."""

    what: str
    passed: bool
    found: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A scenario's ``figures`` go into its JSON; ``lines`` say the same to a reader."""

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
