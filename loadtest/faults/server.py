"""The server that a scenario does something to."""

from __future__ import annotations

import argparse
from dataclasses import replace

from chairlift.engine.config import DEFAULT_MODEL
from chairlift.loadtest import peers
from chairlift.loadtest.child import ChildServer

START_LIMIT = 300.0


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Which model it serves."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="default: %(default)s")


def serving(model: str, *flags: str) -> ChildServer:
    """Chairlift in a process of its own, for as long as a ``with`` lasts."""
    spec = peers.ours(model)
    return ChildServer(replace(spec, command=[*spec.command, *flags]), START_LIMIT)
