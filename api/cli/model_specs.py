"""The models that ``serve`` is told to serve, each with its own flags."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace

from chairlift.api.cli.arguments.config_sources import (
    ConfigError,
    TablesAction,
    keys_of,
    table_values,
)
from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.cli.arguments.setting import Setting
from chairlift.api.cli.engine_settings import engine_config
from chairlift.api.cli.serve_flags import (
    adapter_flags,
    batching_flags,
    device_flags,
    model_flags,
    output_flags,
)
from chairlift.api.models.spec import ModelSpec
from chairlift.api.settings import ServerSettings
from chairlift.engine.config import EngineConfig

# The modules whose flags are about one model.
_MODULES = (model_flags, device_flags, adapter_flags, batching_flags, output_flags)
# For all models together: a share of the device, and the folder that requests may name.
_SHARED = ("gpu-memory-utilization", "lora-dir")
# They name one model, so that the others do not inherit them.
_IDENTITY = ("revision", "served_model_name", "alias")


def model_keys(parser: argparse.ArgumentParser) -> list[str]:
    """The keys of a [[models]] table: the flags of one model, and those of its engine."""
    own = CommandParser(add_help=False)
    for module in _MODULES:
        module.add_arguments(own)
    of_engine = {field.name for field in fields(EngineConfig)}
    actions = [action for action in own._actions if not isinstance(action, TablesAction)]
    more = (action for action in parser._actions if action.dest in of_engine)
    keys = dict.fromkeys((*keys_of(actions), *keys_of(more)))
    return [key for key in keys if key not in _SHARED]


def model_specs(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    settings: ServerSettings,
    sourced: Iterable[Setting],
) -> list[ModelSpec]:
    """The models, in order: the positional one, the further ones, the tables of the file.

    Every model has the flags of the command, and those of its table override them.

    Args:
        parser: the parser of ``serve``.
        options: its resolved values.
        settings: the server's settings from them.
        sourced: the same values with their sources.

    Raises:
        ConfigError, ValueError: a table or a flag is wrong.
    """
    of_default = any(s.key == "model" and s.source == "default" for s in sourced)
    if not options.models:
        return [_spec(options, settings)]
    given = [name for name in _IDENTITY if getattr(options, name)]
    if of_default and given:
        flag = "--" + given[0].replace("_", "-")
        raise ValueError(f"{flag} is for one model; give it in the model's [[models]] table")
    first = [] if of_default else [options]
    each = [*first, *_further(parser, options)]
    return [_spec(one, settings) for one in each]


def _further(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> Iterator[argparse.Namespace]:
    known = model_keys(parser)
    for number, model in enumerate(options.models, 1):
        own = copy.copy(options)
        for name in _IDENTITY:
            setattr(own, name, parser.get_default(name))
        # It is the share of all models.
        own.gpu_memory_utilization = None
        if isinstance(model, str):
            own.model = model
        else:
            place = f"{options.config}: models table {number}"
            values = table_values(parser, model, known, place)
            if "model" not in values:
                raise ConfigError(f"{place}: has no key 'model'")
            vars(own).update(values)
        yield own


def _spec(options: argparse.Namespace, settings: ServerSettings) -> ModelSpec:
    own = replace(
        settings,
        served_model_name=options.served_model_name,
        **model_flags.generation_settings(options),
        **adapter_flags.adapter_settings(options),
        **output_flags.output_settings(options),
    )
    return ModelSpec(
        engine_config(options), own, tuple(options.alias), options.load, options.keep_alive
    )
