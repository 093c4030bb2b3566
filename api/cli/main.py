"""The ``chairlift`` command: parses the flags, builds the settings and runs one subcommand.

NOTE: this module and what it imports at the top load nothing slow; see the package's docstring.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Container, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from chairlift.api.admission.keys import KEY_VARIABLE, KeyFileError
from chairlift.api.cli import (
    batching_flags,
    config_sources,
    limit_flags,
    model_flags,
    network_flags,
    observability_flags,
    output_flags,
)
from chairlift.api.cli.config_sources import ConfigError, Setting
from chairlift.api.server import signals, standard_streams
from chairlift.api.server.sockets import bind_all
from chairlift.api.server.tls import Certificate
from chairlift.api.settings import ServerSettings
from chairlift.engine.config import EngineConfig
from chairlift.engine.device.backend import BackendError
from chairlift.engine.device.open_files import import_mlx_lm
from chairlift.engine.logs.setup import set_up_logs

logger = logging.getLogger(__name__)

_ENGINE = EngineConfig()


class _Command(NamedTuple):
    """A subcommand other than ``serve``. Its module has ``add_arguments`` and ``run``."""

    module: str
    help: str


COMMANDS = {
    "bench": _Command("chairlift.loadtest.cli", "load-test a server and check its replies"),
    "chat": _Command("chairlift.api.cli.chat", "talk to a running server in the terminal"),
    "models": _Command("chairlift.api.cli.models", "list the models on disk"),
    "doctor": _Command(
        "chairlift.api.cli.doctor", "check whether this machine can serve, and how fast"
    ),
    "fetch": _Command("chairlift.api.cli.fetch", "download a model and verify its checksums"),
    "completion": _Command("chairlift.api.cli.completion", "print a shell's completion script"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = build_parser(arguments[:1], arguments[1:]).parse_args(arguments)
    exit_code: int = options.run(options)
    return exit_code


def build_parser(
    complete: Container[str], arguments: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Builds the parser of the command and its subcommands.

    A subcommand other than ``serve`` gets its flags only if it is in ``complete``, because its
    module may be slow to import. ``arguments`` are the command-line arguments of ``serve``.
    """
    parser = argparse.ArgumentParser(
        prog="chairlift",
        description="Serves one language model to many clients in continuous batches.",
    )
    parser.add_argument("--version", action="version", version=f"chairlift {version('chairlift')}")
    commands = parser.add_subparsers(required=True, metavar=f"{{serve,{','.join(COMMANDS)}}}")
    serve = commands.add_parser("serve", help="serve a model over the OpenAI API")
    add_serve_arguments(serve)
    serve.set_defaults(run=lambda _: _serve(serve, arguments))
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help)
        if name in complete:
            module = import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model and all flags of ``serve``, one group for each module."""
    for flags in (
        network_flags,
        model_flags,
        batching_flags,
        limit_flags,
        output_flags,
        observability_flags,
        config_sources,
    ):
        flags.add_arguments(parser)


def _serve(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    signals.before_loop()
    standard_streams.fill()
    try:
        options, sourced = config_sources.resolve(parser, arguments, os.environ)
        if options.print_config:
            _print_settings(sourced)
        config = engine_config(options)
        settings = server_settings(options)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    except KeyFileError as error:
        print(f"chairlift: error: {error}", file=sys.stderr)
        return 1
    if options.print_config:
        return 0
    set_up_logs(options.log_level, options.log_format, "api")
    try:
        certificate = Certificate.from_settings(settings)
        sockets = bind_all(settings)
    except OSError as error:
        logger.critical("%s", error)
        return 1
    # Otherwise transformers advises users in every process to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Slow imports come last, so that wrong settings fail at once.
    try:
        import_mlx_lm()
    except BackendError as error:
        logger.critical("%s", error)
        return 1
    from chairlift.api.server.serve import Server, serve

    supervision = limit_flags.supervision(options)
    return serve(Server(settings, config, supervision, sockets, certificate))


def _print_settings(settings: Sequence[Setting]) -> None:
    print(config_sources.as_toml(settings), end="")
    if os.environ.get(KEY_VARIABLE):
        print(f"# {KEY_VARIABLE} = {config_sources.MASK}  # environment")


def server_settings(options: argparse.Namespace) -> ServerSettings:
    """The API process's settings from the flags of ``serve``.

    Raises:
        ValueError: two flags contradict each other; the message names them.
        KeyFileError: the keys cannot be read.
    """
    return ServerSettings(
        served_model_name=options.served_model_name,
        **network_flags.network_settings(options, limit_flags.key_limits(options)),
        **limit_flags.limit_settings(options),
        **output_flags.output_settings(options),
        **observability_flags.observability_settings(options),
    )


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's settings from the flags of ``serve``.

    Raises:
        ValueError: a flag is given without another that it needs; the message names both.
    """
    dir_bytes, group_size = options.prefix_cache_dir_bytes, options.kv_group_size
    if dir_bytes is not None and options.prefix_cache_dir is None:
        raise ValueError("--prefix-cache-dir-bytes needs --prefix-cache-dir")
    swap_dir_bytes = options.swap_dir_bytes
    if swap_dir_bytes is not None and options.swap_dir is None:
        raise ValueError("--swap-dir-bytes needs --swap-dir")
    if group_size is not None and options.kv_bits is None:
        raise ValueError("--kv-group-size needs --kv-bits")
    return EngineConfig(
        model=options.model,
        dtype=options.dtype,
        threads=options.threads,
        max_rows=options.max_rows,
        max_step_tokens=options.max_step_tokens,
        max_step_ms=options.max_step_ms,
        kv_memory=options.kv_memory,
        max_queue=options.max_queue,
        max_context=options.max_context,
        priority_ageing=options.priority_ageing,
        trust_remote_code=options.trust_remote_code,
        prefix_cache_bytes=options.prefix_cache_bytes,
        prefix_cache_dir=options.prefix_cache_dir,
        prefix_cache_dir_bytes=_ENGINE.prefix_cache_dir_bytes if dir_bytes is None else dir_bytes,
        swap_memory=options.swap_memory,
        swap_dir=options.swap_dir,
        swap_dir_bytes=_ENGINE.swap_dir_bytes if swap_dir_bytes is None else swap_dir_bytes,
        kv_bits=options.kv_bits,
        kv_group_size=_ENGINE.kv_group_size if group_size is None else group_size,
    )
