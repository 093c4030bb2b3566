"""A tiny config for each model file of the installed mlx-lm, from its ModelArgs' field names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import mlx_lm.models

from conformance.overrides import HELPERS, NOT_APPLICABLE, OVERRIDES, Text
from conformance.values import VALUES


def model_names() -> list[str]:
    """The model files of the installed mlx-lm, without its helper modules, in order."""
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return sorted(set(names) - HELPERS, key=str.lower)


def reason_not_applicable(name: str) -> str | None:
    """Why a model file cannot be checked here; None where it can."""
    return NOT_APPLICABLE.get(name)


def tiny_config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a tiny instance.

    Raises:
        KeyError: a field without a default has no tiny value.
    """
    module = _module(name)
    return _config(module.ModelArgs, OVERRIDES.get(name, {})) | {"model_type": name}


def tiny_args(name: str) -> tuple[ModuleType, Any]:
    """The model file's module, and its ModelArgs for a tiny instance."""
    module = _module(name)
    return module, module.ModelArgs.from_dict(tiny_config(name))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"mlx_lm.models.{name}")


def _config(args: type, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Tiny values for the dataclass ``args``; overrides of None restore the default."""
    config: dict[str, Any] = {}
    for field in dataclasses.fields(args):
        if field.name in overrides:
            value = overrides[field.name]
            config[field.name] = _text(value) if isinstance(value, Text) else value
        elif field.name in VALUES:
            config[field.name] = VALUES[field.name]
        elif field.name != "model_type" and _is_required(args, field.name):
            raise KeyError(f"{args.__module__}.{args.__name__}.{field.name} has no tiny value")
    return config


def _text(text: Text) -> dict[str, Any]:
    """The config of the text model that a multimodal wrapper holds."""
    args = getattr(_module(text.module), text.args)
    overrides = OVERRIDES.get(text.module, {}) if text.args == "ModelArgs" else {}
    return _config(args, {**overrides, **text.values}) | {
        "model_type": text.values.get("model_type", text.module)
    }


def _is_required(args: type, name: str) -> bool:
    return inspect.signature(args).parameters[name].default is inspect.Parameter.empty
