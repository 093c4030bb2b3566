"""The command ``chairlift``: a thin layer that builds the settings. Imports nothing slow."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version

from chairlift.api.settings import ServerSettings
from chairlift.engine.config import DEFAULT_MODEL, EngineConfig

_SERVER = ServerSettings()
_ENGINE = EngineConfig()
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:I?B)?", re.IGNORECASE)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="chairlift",
        description="Serves one language model to many clients in continuous batches.",
    )
    parser.add_argument("--version", action="version", version=f"chairlift {version('chairlift')}")
    commands = parser.add_subparsers(required=True, metavar="{serve,bench}")
    serve = commands.add_parser("serve", help="serve a model over the OpenAI API")
    _add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    bench = commands.add_parser("bench", help="load-test a server and check its answers")
    if arguments[:1] == ["bench"]:
        from chairlift.loadtest import cli as loadtest

        loadtest.add_arguments(bench)
        bench.set_defaults(run=loadtest.run)
    options = parser.parse_args(arguments)
    exit_code: int = options.run(options)
    return exit_code


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a hub id, an mlx-lm or HF directory, or a .gguf file (default: %(default)s)",
    )
    add = parser.add_argument_group("server").add_argument
    add("--host", default=_SERVER.host, help="address to bind (default: %(default)s)")
    add("--port", type=_port, default=_SERVER.port, help="0 chooses one (default: 8000)")
    add("--served-model-name", metavar="NAME", help="the model's id in the API (default: its own)")
    add(
        "--max-body-bytes",
        type=byte_size,
        default=_SERVER.max_body_bytes,
        metavar="SIZE",
        help="largest request body (default: 16M)",
    )
    add(
        "--keep-alive-seconds",
        type=_positive_seconds,
        default=_SERVER.keep_alive_seconds,
        metavar="S",
        help="a stream silent for this long gets a comment line (default: %(default)g)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add = parser.add_argument_group("engine").add_argument
    add(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="auto: float32 on the CPU, the model's own elsewhere",
    )
    add("--max-rows", type=_positive, metavar="N", help="most sequences in one batch")
    add("--max-step-tokens", type=_positive, metavar="N", help="most tokens computed in one step")
    add(
        "--kv-memory",
        type=byte_size,
        metavar="SIZE",
        help="bytes for the KV cache, like 4G or 512M (default: a share of what is free)",
    )
    add(
        "--max-queue",
        type=_positive,
        default=_ENGINE.max_queue,
        metavar="N",
        help="most requests that wait; more are refused with 429 (default: %(default)s)",
    )
    add(
        "--max-context",
        "--max-model-len",
        type=_positive,
        metavar="N",
        help="most tokens of a request, prompt and output (default: the model's limit)",
    )
    add("--trust-remote-code", action="store_true", help="run Python code that comes with a model")


def _serve(options: argparse.Namespace) -> int:
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # transformers would advise, in every process, to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from chairlift.api.serve import serve

    settings = ServerSettings(
        host=options.host,
        port=options.port,
        served_model_name=options.served_model_name,
        max_body_bytes=options.max_body_bytes,
        keep_alive_seconds=options.keep_alive_seconds,
    )
    return serve(settings, engine_config(options))


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's settings from the flags of ``serve``."""
    return EngineConfig(
        model=options.model,
        dtype=options.dtype,
        max_rows=options.max_rows,
        max_step_tokens=options.max_step_tokens,
        kv_memory=options.kv_memory,
        max_queue=options.max_queue,
        max_context=options.max_context,
        trust_remote_code=options.trust_remote_code,
    )


def byte_size(text: str) -> int:
    """Bytes from "4G", "512M", "1.5GiB" or "4096": units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 4G, 512M or 4096")
    return size


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
