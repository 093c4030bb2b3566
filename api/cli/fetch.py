"""``chairlift fetch``: a model is on disk, whole and checked, before it is to be served."""

from __future__ import annotations

import argparse
import sys

from chairlift.engine.config import DEFAULT_MODEL
from chairlift.engine.errors import ModelError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model."""
    parser.description = (
        "Downloads a model, goes on where an earlier download was interrupted, and compares each "
        "file with its checksum. Prints where it is."
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a hub id like mlx-community/Qwen3-0.6B-4bit (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Fetches it; returns 0, 1 if it cannot be or is not whole, 130 when interrupted."""
    from chairlift.engine.hub.source import fetch

    try:
        print(fetch(options.model).path)
    except ModelError as error:
        print(f"chairlift fetch: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("chairlift fetch: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0
