"""``chairlift doctor``: checks whether this machine can serve, and what would make it faster."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from chairlift.api.cli.flags import port
from chairlift.api.settings import ServerSettings

_SERVER = ServerSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``doctor``."""
    parser.description = (
        "Checks what a server needs from this machine; exit code 0 if it can serve, else 1."
    )
    add = parser.add_argument
    add("--host", default=_SERVER.host, help="address to check (default: %(default)s)")
    add("--port", type=port, default=_SERVER.port, help="port to check (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if the machine can serve, else 1."""
    from chairlift.engine.process.diagnosis import diagnose

    findings = list(diagnose(options.host, options.port))
    serves = all(finding.serves for finding in findings)
    if options.json:
        listed = [asdict(finding) for finding in findings]
        print(json.dumps({"serves": serves, "findings": listed}, indent=2))
        return 0 if serves else 1
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        mark = "ok" if finding.advice is None else "--" if finding.serves else "NO"
        print(f"{mark}  {finding.topic.ljust(width)}  {finding.value}")
        if finding.advice is not None:
            print(f"    {' ' * width}  {finding.advice}")
    print("It can serve." if serves else "It cannot serve: see the lines marked NO.")
    return 0 if serves else 1
