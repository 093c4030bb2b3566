"""``chairlift serve``: serves models; reads its settings from flags, environment and file."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys

from chairlift.api.admission.keys import KeyFileError
from chairlift.api.cli.arguments import alias_flags, config_sources
from chairlift.api.cli.arguments.config_sources import ConfigError
from chairlift.api.cli.arguments.device_values import chosen
from chairlift.api.cli.arguments.openai_key import log_origin, with_openai_key
from chairlift.api.cli.arguments.setting import as_toml
from chairlift.api.cli.arguments.short_help import add_help_all
from chairlift.api.cli.engine_settings import engine_config
from chairlift.api.cli.model_specs import model_specs
from chairlift.api.cli.serve_flags import (
    adapter_flags,
    batching_flags,
    device_flags,
    file_flags,
    limit_flags,
    model_flags,
    network_flags,
    observability_flags,
    output_flags,
)
from chairlift.api.models.spec import ModelsMemory
from chairlift.api.server import standard_streams
from chairlift.api.server.sockets import bind_all
from chairlift.api.server.tls import Certificate
from chairlift.api.settings import ServerSettings
from chairlift.engine.device.backend import BackendError
from chairlift.engine.device.open_files import import_mlx_lm
from chairlift.engine.logs.setup import set_up_logs

logger = logging.getLogger(__name__)

COMMON_FLAGS = (
    *("--host", "--port", "--api-key", "--served-model-name", "--dtype"),
    *("--max-context", "--max-rows", "--kv-memory", "--log-level", "--config"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model and all flags, one group for each module."""
    parser.usage = "%(prog)s [MODEL ...] [flags]"
    parser.description = "Serves models over the APIs of OpenAI, Anthropic and Ollama."
    add_help_all(parser, COMMON_FLAGS)
    for flags in (
        network_flags,
        model_flags,
        device_flags,
        adapter_flags,
        batching_flags,
        limit_flags,
        file_flags,
        output_flags,
        observability_flags,
        alias_flags,
        config_sources,
    ):
        flags.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serves until a signal stops the server; returns the exit code.

    Args:
        options: ``parser`` is the one of ``add_arguments``, and has accepted ``arguments``.
    """
    parser: argparse.ArgumentParser = options.parser
    standard_streams.fill()
    try:
        resolved = config_sources.resolve(parser, options.arguments, os.environ)
        options, sourced = with_openai_key(resolved, os.environ)
        config = engine_config(options)
        if options.print_config:
            print(as_toml(sourced, chosen(config)), end="")
        settings = server_settings(options)
        specs = model_specs(parser, options, settings, sourced)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    except KeyFileError as error:
        print(f"chairlift: error: {error}", file=sys.stderr)
        return 1
    if options.print_config:
        return 0
    set_up_logs(options.log_level, options.log_format, "api")
    log_origin(sourced, os.environ)
    try:
        certificate = Certificate.from_settings(settings)
        sockets = bind_all(settings)
    except OSError as error:
        logger.critical("%s", error)
        return 1
    # Otherwise transformers advises users in every process to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Slow imports come last, so that wrong settings fail at once. They leave no garbage; looking
    # for some would take a tenth of the start.
    gc.disable()
    try:
        import_mlx_lm()
        from chairlift.api.server.serve import Server, serve
    except BackendError as error:
        logger.critical("%s", error)
        return 1
    finally:
        gc.freeze()
        gc.enable()
    supervision = limit_flags.supervision(options)
    share = options.gpu_memory_utilization if len(specs) > 1 else None
    memory = ModelsMemory(options.models_memory, share)
    return serve(Server(settings, specs, memory, supervision, sockets, certificate))


def server_settings(options: argparse.Namespace) -> ServerSettings:
    """The API process's settings from the flags of ``serve``.

    Raises:
        ValueError: two flags contradict each other; the message names them.
        KeyFileError: the keys cannot be read.
    """
    return ServerSettings(
        served_model_name=options.served_model_name,
        **model_flags.generation_settings(options),
        **adapter_flags.adapter_settings(options),
        **network_flags.network_settings(options, limit_flags.key_limits(options)),
        **limit_flags.limit_settings(options),
        **file_flags.file_settings(options),
        **output_flags.output_settings(options),
        **observability_flags.observability_settings(options),
    )
