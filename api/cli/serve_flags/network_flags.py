"""The flags of ``serve`` for its addresses and for access to it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift.api.admission.keys import (
    KEY_VARIABLE,
    OPENAI_VARIABLE,
    KeyLimits,
    given_keys,
    read_keys,
)
from chairlift.api.cli.arguments.list_types import api_keys
from chairlift.api.cli.flags import byte_size, directory, port, positive_seconds
from chairlift.api.settings import ServerSettings

_DEFAULTS = ServerSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "Network and access"."""
    group = parser.add_argument_group("Network and access")
    _add_connections(group)
    _add_access(group)
    _add_image_sources(group)
    _add_status(group)


def _add_connections(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default=_DEFAULTS.host, help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=port,
        default=_DEFAULTS.port,
        help="port to listen on; 0 picks a free one (default: 8000)",
    )
    add(
        "--max-body-bytes",
        type=byte_size,
        default=_DEFAULTS.max_body_bytes,
        metavar="SIZE",
        help="maximum size of a request body (default: 16M)",
    )
    add(
        "--keep-alive-seconds",
        type=positive_seconds,
        default=_DEFAULTS.keep_alive_seconds,
        metavar="S",
        help="send a comment line on a stream that was silent for this long (default: %(default)g)",
    )


def _add_access(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--api-key",
        type=api_keys,
        action="extend",
        default=[],
        metavar="KEY",
        help="a key that clients must send; may be repeated, or be a list with commas; other users "
        f"of the machine can see flags, so prefer ${KEY_VARIABLE} or --api-key-file (default: "
        f"${OPENAI_VARIABLE}, unless there is a file; without any, no key is needed)",
    )
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help='TOML file with one table for each key: [name], key = "…" or sha256 = "…", and '
        "optionally rpm, tpm, max_streams (default: none)",
    )
    add("--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    add(
        "--ssl-keyfile",
        type=Path,
        metavar="FILE",
        help="private key of the certificate (default: in the certificate's file)",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow web pages from this origin to call the API; may be repeated; * allows any "
        "(default: none)",
    )


def _add_image_sources(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--allowed-media-domains",
        action="append",
        default=[],
        metavar="HOST",
        help="fetch images of requests from this host, if its address is public; may be repeated, "
        "or several with commas (default: none)",
    )
    add(
        "--allowed-local-media-path",
        type=directory,
        metavar="DIR",
        help="read images of requests from below this folder, by file:/// URLs (default: none)",
    )


def _add_status(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--no-ui", action="store_true", help="do not serve the status page at / or its events")
    add(
        "--metrics-port",
        type=port,
        metavar="PORT",
        help="serve /metrics on this port instead of --port",
    )
    add(
        "--metrics-host",
        default=_DEFAULTS.metrics_host,
        metavar="HOST",
        help="address of --metrics-port (default: %(default)s)",
    )


def network_settings(options: argparse.Namespace, limits: KeyLimits) -> dict[str, Any]:
    """The fields of ``ServerSettings`` for these flags.

    ``limits`` are the default limits of the keys in the key file.

    Raises:
        ValueError: two flags contradict each other; the message names them.
        KeyFileError: the keys cannot be read.
    """
    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        raise ValueError("--ssl-keyfile needs --ssl-certfile")
    if options.metrics_port is not None and options.metrics_port == options.port != 0:
        raise ValueError("--metrics-port must not be --port")
    for origin in options.cors_origin:
        if origin != "*" and ("://" not in origin or origin.endswith("/")):
            raise ValueError(f"--cors-origin {origin!r} is no origin like https://example.org")
    given = given_keys(options.api_key, limits)
    return {
        "host": options.host,
        "port": options.port,
        "max_body_bytes": options.max_body_bytes,
        "keep_alive_seconds": options.keep_alive_seconds,
        "keys": read_keys(options.api_key_file, limits, given),
        "given_keys": given,
        "api_key_file": options.api_key_file,
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
        "cors_origins": tuple(options.cors_origin),
        "allowed_media_domains": media_domains(options.allowed_media_domains),
        "allowed_local_media_path": options.allowed_local_media_path,
        "ui": not options.no_ui,
        "metrics_host": options.metrics_host,
        "metrics_port": options.metrics_port,
    }


def media_domains(given: Sequence[str]) -> tuple[str, ...]:
    """The hosts that images are fetched from.

    Raises:
        ValueError: one is no host's name.
    """
    domains = [name.strip() for names in given for name in names.split(",") if name.strip()]
    for domain in domains:
        if not re.fullmatch(r"[\w.-]+", domain):
            raise ValueError(
                f"--allowed-media-domains {domain!r} is no host's name like images.example.org"
            )
    return tuple(domains)
