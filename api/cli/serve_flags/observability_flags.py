"""The flags of ``serve`` for logs, traces and self-checks."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from chairlift.api.cli.flags import http_url
from chairlift.api.settings import ServerSettings
from chairlift.engine.device.backend import install
from chairlift.engine.logs.setup import LOG_FORMATS

_DEFAULTS = ServerSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "Observability"."""
    add = parser.add_argument_group("Observability").add_argument
    add(
        "--log-level",
        type=str.lower,
        choices=("debug", "info", "warning", "error", "critical"),
        default="info",
        help="least severe level that is logged, in small or capital letters (default: info)",
    )
    add(
        "--log-format",
        choices=LOG_FORMATS,
        default=_DEFAULTS.log_format,
        help="lines of text, or one JSON object per line (default: %(default)s)",
    )
    add(
        "--canary-interval",
        type=_seconds,
        default=_DEFAULTS.canary_interval,
        metavar="SECONDS",
        help="how often an idle engine computes a finished request again and compares the tokens; "
        "0: never (default: 0)",
    )
    add(
        "--otlp-endpoint",
        type=_otlp_endpoint,
        metavar="URL",
        help="send OpenTelemetry traces to this address with OTLP over HTTP, like "
        "http://127.0.0.1:4318 (default: no traces)",
    )


def observability_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``ServerSettings`` for these flags."""
    return {
        "log_format": options.log_format,
        "canary_interval": options.canary_interval,
        "otlp_endpoint": options.otlp_endpoint,
    }


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, or 0")
    return seconds


def _otlp_endpoint(text: str) -> str:
    url = http_url(text)
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_installed(module):
            command = install("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
            raise argparse.ArgumentTypeError(f"traces need OpenTelemetry: run '{command}'")
    return url


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
