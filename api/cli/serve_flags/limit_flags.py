"""The flags of ``serve`` that limit requests, clients and times."""

from __future__ import annotations

import argparse
from typing import Any

from chairlift.api.admission.keys import KeyLimits
from chairlift.api.cli.flags import byte_size, byte_size_or_zero, positive, positive_seconds
from chairlift.api.settings import ServerSettings
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig

_SERVER = ServerSettings()
_ENGINE = EngineConfig()
_SUPERVISION = Supervision()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "Limits"."""
    group = parser.add_argument_group("Limits")
    _add_amounts(group)
    _add_times(group)


def _add_amounts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-context",
        type=positive,
        metavar="N",
        help="maximum tokens of a request, prompt and output (default: the model's limit)",
    )
    add(
        "--max-queue",
        type=positive,
        default=_ENGINE.max_queue,
        metavar="N",
        help="maximum number of waiting requests; further ones are refused with 429 "
        "(default: %(default)s)",
    )
    add(
        "--models-memory",
        type=byte_size,
        metavar="SIZE",
        help="maximum memory of the engines of all models together: bytes, like 40G; the least "
        "recently used model without requests is unloaded when another needs its memory (default "
        "for several models: the share --gpu-memory-utilization of the device, else most of what "
        "is free at the start)",
    )
    add(
        "--rpm",
        type=positive,
        metavar="N",
        help="maximum requests per minute and key (default: no limit)",
    )
    add(
        "--tpm",
        type=positive,
        metavar="N",
        help="maximum tokens per minute and key, prompt and output (default: no limit)",
    )
    add(
        "--max-streams",
        type=positive,
        metavar="N",
        help="maximum concurrent choices per key, including waiting ones (default: no limit)",
    )
    add(
        "--response-store-bytes",
        type=byte_size_or_zero,
        default=_SERVER.response_store_bytes,
        metavar="SIZE",
        help="maximum memory for stored responses of /v1/responses, which clients can continue: "
        "bytes, like 4G or 512M; 0 stores none (default: 64M)",
    )
    add(
        "--response-store-seconds",
        type=positive_seconds,
        default=_SERVER.response_store_seconds,
        metavar="S",
        help="how long a response is stored (default: %(default)g)",
    )


def _add_times(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--request-timeout",
        type=positive_seconds,
        metavar="S",
        help="maximum duration of a request; its field timeout can shorten it (default: no limit)",
    )
    add(
        "--slow-reader-timeout",
        type=positive_seconds,
        default=_SERVER.slow_reader_seconds,
        metavar="S",
        help="disconnect a client that leaves sent data unread for this long "
        "(default: %(default)g)",
    )
    add(
        "--slow-reader-tokens",
        type=positive,
        default=_SERVER.slow_reader_tokens,
        metavar="N",
        help="disconnect a client when more than this many tokens wait for it "
        "(default: %(default)s)",
    )
    add(
        "--drain-timeout",
        type=positive_seconds,
        default=_SERVER.drain_seconds,
        metavar="S",
        help="how long running requests may continue after SIGTERM or SIGINT "
        "(default: %(default)g)",
    )
    add(
        "--engine-timeout",
        type=positive_seconds,
        default=_SUPERVISION.timeout,
        metavar="S",
        help="restart an engine process that has work but finishes no step for this long, and "
        "continue its requests in the new one; must exceed the longest step "
        "(default: %(default)g)",
    )
    add(
        "--engine-start-attempts",
        type=_attempts,
        default=_SUPERVISION.attempts,
        metavar="N",
        help="exit with code 1 when the engine has failed to start this many times in a row "
        "(default: %(default)s)",
    )


def key_limits(options: argparse.Namespace) -> KeyLimits:
    """The limits of clients without a key, and the default limits of keys."""
    return KeyLimits(options.rpm, options.tpm, options.max_streams)


def limit_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``ServerSettings`` for these flags."""
    return {
        "anonymous": key_limits(options),
        "response_store_bytes": options.response_store_bytes,
        "response_store_seconds": options.response_store_seconds,
        "drain_seconds": options.drain_timeout,
        "request_seconds": options.request_timeout,
        "slow_reader_seconds": options.slow_reader_timeout,
        "slow_reader_tokens": options.slow_reader_tokens,
    }


def supervision(options: argparse.Namespace) -> Supervision:
    """The limits after which the engine process is restarted, and the server gives up."""
    return Supervision(options.engine_timeout, options.engine_start_attempts)


def _attempts(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 100):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100")
    return int(text)
