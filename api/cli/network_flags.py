"""The flags of ``serve`` about who may come, how much of it, and how the server ends."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from chairlift.api.admission.keys import KEY_VARIABLE, KeyLimits, read_keys
from chairlift.api.cli.flags import byte_size_or_zero, port, positive, positive_seconds
from chairlift.api.settings import ServerSettings

_SERVER = ServerSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    _add_doors(parser)
    _add_stored_responses(parser)
    _add_life_cycle(parser)


def _add_doors(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("doors").add_argument
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help='TOML, a table for each key: [name], key = "…" or sha256 = "…", and rpm, tpm, '
        f"max_streams of its own; one more key may be in ${KEY_VARIABLE} (default: no key needed)",
    )
    add("--rpm", type=positive, metavar="N", help="requests a minute and key (default: no limit)")
    add(
        "--tpm",
        type=positive,
        metavar="N",
        help="tokens a minute and key, prompt and output (default: no limit)",
    )
    add(
        "--max-streams",
        type=positive,
        metavar="N",
        help="choices at once and key, those that wait included (default: no limit)",
    )
    add("--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    add(
        "--ssl-keyfile",
        type=Path,
        metavar="FILE",
        help="its private key (default: in the same file)",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages from this origin call the API; may be repeated; * is any "
        "(default: none)",
    )
    add("--no-ui", action="store_true", help="no page at /, and no events for it")
    add(
        "--metrics-port",
        type=port,
        metavar="PORT",
        help="serve /metrics on a port of its own, and not on --port",
    )
    add(
        "--metrics-host",
        default=_SERVER.metrics_host,
        metavar="HOST",
        help="address of that port (default: %(default)s)",
    )


def _add_stored_responses(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("stored responses (/v1/responses)").add_argument
    add(
        "--response-store-bytes",
        type=byte_size_or_zero,
        default=_SERVER.response_store_bytes,
        metavar="SIZE",
        help="most memory for responses that clients may go on from: bytes, like 4G or 512M; "
        "0: none is kept (default: 64M)",
    )
    add(
        "--response-store-seconds",
        type=positive_seconds,
        default=_SERVER.response_store_seconds,
        metavar="S",
        help="how long each is kept (default: %(default)g)",
    )


def _add_life_cycle(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("time limits").add_argument
    add(
        "--drain-timeout",
        type=positive_seconds,
        default=_SERVER.drain_seconds,
        metavar="S",
        help="after SIGTERM or SIGINT, how long running requests may go on (default: %(default)g)",
    )
    add(
        "--request-timeout",
        type=positive_seconds,
        metavar="S",
        help="longest that a request may take; the field timeout makes it less (default: no limit)",
    )
    add(
        "--slow-reader-timeout",
        type=positive_seconds,
        default=_SERVER.slow_reader_seconds,
        metavar="S",
        help="a client that leaves unread what was sent for so long is cut off "
        "(default: %(default)g)",
    )
    add(
        "--slow-reader-tokens",
        type=positive,
        default=_SERVER.slow_reader_tokens,
        metavar="N",
        help="or as soon as more tokens than this wait for it (default: %(default)s)",
    )


def door_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What of ServerSettings these flags say.

    Raises:
        ValueError: flags that do not go together, by name.
        KeyFileError: the keys cannot be read.
    """
    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        raise ValueError("--ssl-keyfile needs --ssl-certfile")
    if options.metrics_port is not None and options.metrics_port == options.port != 0:
        raise ValueError("--metrics-port must not be --port")
    for origin in options.cors_origin:
        if origin != "*" and ("://" not in origin or origin.endswith("/")):
            raise ValueError(f"--cors-origin {origin!r} is no origin like https://example.org")
    limits = KeyLimits(options.rpm, options.tpm, options.max_streams)
    return {
        "keys": read_keys(options.api_key_file, os.environ.get(KEY_VARIABLE), limits),
        "api_key_file": options.api_key_file,
        "anonymous": limits,
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
        "cors_origins": tuple(options.cors_origin),
        "response_store_bytes": options.response_store_bytes,
        "response_store_seconds": options.response_store_seconds,
        "ui": not options.no_ui,
        "metrics_host": options.metrics_host,
        "metrics_port": options.metrics_port,
        "drain_seconds": options.drain_timeout,
        "request_seconds": options.request_timeout,
        "slow_reader_seconds": options.slow_reader_timeout,
        "slow_reader_tokens": options.slow_reader_tokens,
    }
