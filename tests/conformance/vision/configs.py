"""A tiny config for each package of mlx-vlm, from the field names of its config classes."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from conformance.vision.tiny import Tiny
from conformance.vision.types import TYPES
from conformance.vision.values import MODEL, PARTS
from conformance.weights import randomize


def tiny_config(name: str, tiny: Tiny | None = None) -> dict[str, Any]:
    """The ``config.json`` of a tiny instance; ``tiny`` goes before that of ``TYPES``.

    Raises:
        KeyError: a field without a default has no tiny value.
    """
    package = importlib.import_module(f"mlx_vlm.models.{name}")
    overrides = (tiny or TYPES[name]).config
    parts: dict[str, Any] = {}
    for part, values in PARTS.items():
        given = overrides.get(f"{part}_config", {})
        kind = getattr(package, f"{part.title()}Config", None)
        if given is None:
            continue
        if dataclasses.is_dataclass(kind):
            parts[f"{part}_config"] = _fields(kind, values, given, name)
        else:
            parts[f"{part}_config"] = given
    # Some packages read the text model's values there.
    text = parts.get("text_config", {})
    flat = {key: value for key, value in text.items() if key != "model_type"}
    rest = {
        key: value
        for key, value in overrides.items()
        if key not in {f"{part}_config" for part in PARTS}
    }
    own = _fields(package.ModelConfig, MODEL, rest | parts, name)
    return deepcopy({**flat, **own, **parts, **rest, "model_type": name})


def tiny_model(name: str, seed: int = 0, tiny: Tiny | None = None) -> Any:
    """A random instance in float32, evaluated; the same seed, the same weights.

    ``tiny`` goes before that of ``TYPES``.
    """
    from mlx_vlm.utils import update_module_configs

    package = importlib.import_module(f"mlx_vlm.models.{name}")
    tiny = tiny or TYPES[name]
    set_constants(name, tiny)
    config = tiny_config(name, tiny)
    parsed = package.ModelConfig.from_dict(config)
    parsed = update_module_configs(parsed, package, config, list(PARTS))
    mx.random.seed(seed)  # for parameters that a model draws itself
    model: Module = package.Model(parsed)
    return randomize(model, seed)


def set_constants(name: str, tiny: Tiny) -> None:
    """Replaces what mlx-vlm's code has instead of fields."""
    for path, value in tiny.constants.items():
        owner, _, constant = path.rpartition(".")
        module = f"mlx_vlm.models.{tiny.code or name}.{owner}"
        setattr(pkgutil.resolve_name(module), constant, value)


def _fields(
    kind: Any, values: Mapping[str, Any], given: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Tiny values for a dataclass; other fields keep their defaults."""
    config = dict(given)
    for field in dataclasses.fields(kind):
        if field.name in given:
            continue
        if field.name in values:
            config[field.name] = values[field.name]
        elif field.default is field.default_factory is dataclasses.MISSING:
            if field.name != "model_type":
                raise KeyError(f"{kind.__name__}.{field.name} has no tiny value")
            config[field.name] = name
    return config
