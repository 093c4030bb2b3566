"""``python -m chairlift.loadtest.faults SCENARIO``: runs a scenario and checks its conditions.

The exit code is 0 if all conditions hold, 1 if one does not, and 2 if the scenario could not run.
It starts and ends its own server on the loopback interface.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.loadtest.errors import LoadTestError
from chairlift.loadtest.faults.fuzz import FUZZ
from chairlift.loadtest.faults.hostile import HOSTILE
from chairlift.loadtest.faults.kill import KILL
from chairlift.loadtest.faults.odd import ODD
from chairlift.loadtest.faults.overload import OVERLOAD
from chairlift.loadtest.faults.scenario import Outcome, Scenario
from chairlift.loadtest.faults.sigterm import SIGTERM
from chairlift.loadtest.faults.soak import SOAK
from chairlift.loadtest.servers.child import exit_on_sigterm

SCENARIOS: tuple[Scenario, ...] = (KILL, FUZZ, ODD, HOSTILE, OVERLOAD, SOAK, SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one scenario and prints its result; returns the exit code."""
    parser = CommandParser(prog="python -m chairlift.loadtest.faults", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="SCENARIO")
    for scenario in SCENARIOS:
        command = commands.add_parser(scenario.name, help=scenario.help, description=scenario.help)
        command.add_argument(
            "--model", type=Path, help="a directory or a .gguf file (default: serve's own)"
        )
        command.add_argument(
            "--seed", type=int, default=0, help="seed of everything random (default: %(default)s)"
        )
        command.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
        scenario.add_arguments(command)
        command.set_defaults(scenario=scenario)
    options = parser.parse_args(argv)
    exit_on_sigterm()
    try:
        outcome = options.scenario.run(options.model or _default_model(), options)
    except LoadTestError as error:
        print(f"{options.scenario.name}: {error}", file=sys.stderr)
        return 2
    _report(options.scenario.name, outcome, options.out)
    return 0 if outcome.passed else 1


def _report(name: str, outcome: Outcome, out: Path | None) -> None:
    for line in outcome.lines:
        print(line)
    for check in outcome.checks:
        print(f"{'ok' if check.passed else 'FAILED':6} {check.what}: {check.found}")
    checks = [check._asdict() for check in outcome.checks]
    figures = {"scenario": name, "passed": outcome.passed, **outcome.figures, "checks": checks}
    text = json.dumps(figures, indent=1)
    print(text)
    if out is not None:
        out.write_text(text, encoding="utf-8")


def _default_model() -> Path:
    from chairlift.engine.config import DEFAULT_MODEL
    from chairlift.engine.hub.source import resolve

    return Path(resolve(DEFAULT_MODEL).path)


if __name__ == "__main__":
    sys.exit(main())
