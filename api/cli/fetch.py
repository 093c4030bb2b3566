"""``chairlift fetch``: downloads a model and verifies its checksums, without serving it."""

from __future__ import annotations

import argparse
import signal
import sys

from chairlift.engine.config import DEFAULT_MODEL
from chairlift.engine.errors import ModelError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model and its revision."""
    parser.description = (
        "Downloads a model, resumes an interrupted download, and compares each file with its "
        "checksum. Prints the model's path."
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a hub id like mlx-community/Qwen3-0.6B-4bit, or a GGUF file of a repository, as "
        "organization/name:file.gguf or by its quantization, as organization/name:Q4_K_M "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a hub model (default: its main branch)",
    )


def run(options: argparse.Namespace) -> int:
    """Downloads the model; returns 0, 1 if it failed or a file is damaged, 130 after Ctrl-C."""
    from chairlift.engine.device.light_http import import_http_client
    from chairlift.engine.hub.source import fetch

    import_http_client()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print(fetch(options.model, options.revision).path)
    except ModelError as error:
        print(f"chairlift fetch: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("chairlift fetch: interrupted; the same command continues from here", file=sys.stderr)
        return 130
    return 0
