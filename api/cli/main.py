"""The command ``chairlift``: a thin layer that builds the settings. Imports nothing slow."""

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
    config_sources,
    format_flags,
    network_flags,
    observability_flags,
    supervision_flags,
)
from chairlift.api.cli.config_sources import ConfigError, Setting
from chairlift.api.cli.flags import (
    byte_size,
    byte_size_or_zero,
    directory,
    port,
    positive,
    positive_seconds,
)
from chairlift.api.server import signals, standard_streams
from chairlift.api.server.sockets import bind_all
from chairlift.api.server.tls import Certificate
from chairlift.api.settings import ServerSettings
from chairlift.engine.config import DEFAULT_MODEL, KV_BITS, KV_GROUP_SIZES, EngineConfig
from chairlift.engine.device.backend import BackendError
from chairlift.engine.logs.setup import set_up_logs
from chairlift.engine.process.open_files import import_mlx_lm

logger = logging.getLogger(__name__)

_SERVER = ServerSettings()
_ENGINE = EngineConfig()


class _Command(NamedTuple):
    """A subcommand besides ``serve``: its module has ``add_arguments`` and ``run``."""

    module: str
    help: str


COMMANDS = {
    "bench": _Command("chairlift.loadtest.bench.cli", "load-test a server and check its answers"),
    "chat": _Command("chairlift.api.cli.chat", "talk to a running server in the terminal"),
    "models": _Command("chairlift.api.cli.models", "list the models on disk"),
    "doctor": _Command(
        "chairlift.api.cli.doctor", "tell whether this machine serves, and how well"
    ),
    "fetch": _Command("chairlift.api.cli.fetch", "download a model, and check it"),
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
    """The parser; other commands than ``serve`` have flags if they are in ``complete``.

    Their modules may take long to import. ``arguments`` are what ``serve`` was given.
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
    """The flags of ``serve``."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a hub id, an mlx-lm or HF directory, or a .gguf file (default: %(default)s)",
    )
    add = parser.add_argument_group("server").add_argument
    add("--host", default=_SERVER.host, help="address to bind (default: %(default)s)")
    add("--port", type=port, default=_SERVER.port, help="0 chooses one (default: 8000)")
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
        type=positive_seconds,
        default=_SERVER.keep_alive_seconds,
        metavar="S",
        help="a stream silent for this long gets a comment line (default: %(default)g)",
    )
    add(
        "--embedding-pooling",
        choices=("mean", "last"),
        default=_SERVER.embedding_pooling,
        help="what /v1/embeddings makes one vector of, where a request does not say: the mean of "
        "all tokens' hidden states, or the last token's (default: %(default)s)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add = parser.add_argument_group("engine").add_argument
    add(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="auto: float32 on the CPU (with matrix units for it, quantized weights are rounded to "
        "bfloat16), the model's own elsewhere",
    )
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="threads that compute matrix products on the CPU (default: a core each, and fewer "
        "while other processes want the cores)",
    )
    add("--max-rows", type=positive, metavar="N", help="most sequences in one batch")
    add("--max-step-tokens", type=positive, metavar="N", help="most tokens computed in one step")
    add(
        "--max-step-ms",
        type=positive,
        metavar="MS",
        help="how long a step beside running streams may take; prompts are cut accordingly",
    )
    add(
        "--kv-memory",
        type=byte_size,
        metavar="SIZE",
        help="bytes for the KV cache, like 4G or 512M (default: a share of what is free)",
    )
    add(
        "--max-queue",
        type=positive,
        default=_ENGINE.max_queue,
        metavar="N",
        help="most requests that wait; more are refused with 429 (default: %(default)s)",
    )
    add(
        "--max-context",
        "--max-model-len",
        type=positive,
        metavar="N",
        help="most tokens of a request, prompt and output (default: the model's limit)",
    )
    add(
        "--priority-ageing",
        type=positive_seconds,
        default=_ENGINE.priority_ageing,
        metavar="S",
        help="a request of a class one step less urgent goes first once it has waited this much "
        "longer (default: %(default)g)",
    )
    add("--trust-remote-code", action="store_true", help="run Python code that comes with a model")
    _add_cache_arguments(parser)
    network_flags.add_arguments(parser)
    supervision_flags.add_arguments(parser)
    observability_flags.add_arguments(parser)
    format_flags.add_arguments(parser)
    config_sources.add_arguments(parser)


def _add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("KV cache and shared prefixes").add_argument
    add(
        "--prefix-cache-bytes",
        type=byte_size_or_zero,
        metavar="SIZE",
        help="memory for the KV of earlier prompts, so that a prompt which begins like one of them "
        "need not be computed from its start: bytes, like 4G or 512M; 0 turns it off (default: a "
        "share of the memory, chosen at start)",
    )
    add(
        "--prefix-cache-dir",
        type=directory,
        metavar="DIR",
        help="keep prefixes in this directory too, where they outlast the server "
        "(default: in memory only)",
    )
    add(
        "--prefix-cache-dir-bytes",
        type=byte_size,
        metavar="SIZE",
        help="most bytes in --prefix-cache-dir, like 4G or 512M (default: 10G)",
    )
    add(
        "--swap-memory",
        type=byte_size_or_zero,
        metavar="SIZE",
        help="memory of the host for sequences that are preempted while the KV cache is full, so "
        "that they go on later without being computed again: bytes, like 4G or 512M; 0: they are "
        "computed again (default: 4G, or an eighth of what is free)",
    )
    add(
        "--swap-dir",
        type=directory,
        metavar="DIR",
        help="once half of that is full, keep some of them in unnamed files in this directory "
        "(default: in memory only)",
    )
    add(
        "--swap-dir-bytes",
        type=byte_size,
        metavar="SIZE",
        help="most bytes in --swap-dir, like 4G or 512M (default: 10G)",
    )
    add(
        "--kv-bits",
        type=int,
        choices=KV_BITS,
        help="bits of a number in the KV cache, quantized (default: not quantized)",
    )
    add(
        "--kv-group-size",
        type=int,
        choices=KV_GROUP_SIZES,
        help="numbers that share one scale in a cache quantized by --kv-bits "
        f"(default: {_ENGINE.kv_group_size})",
    )


def _serve(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    signals.before_loop()
    standard_streams.fill()
    try:
        options, given = config_sources.resolve(parser, arguments, os.environ)
        if options.print_config:
            _print(given)
        config = engine_config(options)
        doors = network_flags.door_settings(options)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    except KeyFileError as error:
        print(f"chairlift: error: {error}", file=sys.stderr)
        return 1
    if options.print_config:
        return 0
    settings = ServerSettings(
        host=options.host,
        port=options.port,
        served_model_name=options.served_model_name,
        max_body_bytes=options.max_body_bytes,
        embedding_pooling=options.embedding_pooling,
        keep_alive_seconds=options.keep_alive_seconds,
        log_format=options.log_format,
        canary_interval=options.canary_interval,
        otlp_endpoint=options.otlp_endpoint,
        **doors,
        **format_flags.format_settings(options),
    )
    set_up_logs(options.log_level, options.log_format, "api")
    try:
        certificate = Certificate.of(settings)
        sockets = bind_all(settings)
    except OSError as error:
        logger.critical("%s", error)
        return 1
    # transformers would advise, in every process, to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # What is slow comes after all that may be wrong.
    try:
        import_mlx_lm()
    except BackendError as error:
        logger.critical("%s", error)
        return 1
    from chairlift.api.server.serve import Server, serve

    supervision = supervision_flags.supervision(options)
    return serve(Server(settings, config, supervision, sockets, certificate))


def _print(settings: Sequence[Setting]) -> None:
    print(config_sources.as_toml(settings), end="")
    if os.environ.get(KEY_VARIABLE):
        print(f"# {KEY_VARIABLE} = {config_sources.MASK}  # environment")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's settings from the flags of ``serve``.

    Raises:
        ValueError: flags that do not go together, by name.
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
