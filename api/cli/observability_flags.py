"""The flags of ``serve`` that say what an operator gets to see."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from chairlift.api.settings import ServerSettings
from chairlift.engine.logs.setup import LOG_FORMATS

_DEFAULTS = ServerSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them in a group of their own."""
    add = parser.add_argument_group("observability").add_argument
    add(
        "--log-format",
        choices=LOG_FORMATS,
        default=_DEFAULTS.log_format,
        help="lines for people, or one JSON object a line (default: %(default)s)",
    )
    add(
        "--canary-interval",
        type=_seconds,
        default=_DEFAULTS.canary_interval,
        metavar="SECONDS",
        help="this often, one finished request is computed again while the engine is idle, and its "
        "tokens are compared; 0: never (default: 0)",
    )
    add(
        "--otlp-endpoint",
        type=_otlp_endpoint,
        metavar="URL",
        help="send OpenTelemetry traces there, by OTLP over HTTP, like http://127.0.0.1:4318 "
        "(default: no traces)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, or 0")
    return seconds


def _otlp_endpoint(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not an http:// or https:// address")
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_installed(module):
            raise argparse.ArgumentTypeError(
                "traces need OpenTelemetry: pip install 'chairlift[otel]'"
            )
    return text


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of one of its parents
        return False
