"""Explains in one line why a model's directory cannot be loaded, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.folder_check import absent_parts, choices, read_config, text_config

# Ends of the names of tensors that the quantizations of other tools have.
_PACKED = re.compile(
    r"\.(qweight|qzeros|g_idx|weight_scale_inv|weight_scale|weight_packed|absmax|SCB)\b"
)
# What to do about weights in a foreign form.
REMEDY = (
    "serve the model that it was made from, a GGUF file, or an mlx-lm quantization "
    "(mlx_lm.convert makes one from the former)"
)
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
    list: ((list,), "a list"),
    dict: ((dict,), "an object"),
}


def load_error(path: Path, error: Exception, fields: type | None = None) -> ModelError:
    """The error of a directory or file that failed to load with ``error``.

    Args:
        fields: the dataclass of the configuration's fields, to find one of a wrong type.
    """
    if absent := absent_parts(path):
        files = choices("", absent, "and")
        return ModelError(f"{path}: files of its weights are missing: {files}; fetch them again")
    cause = first_line(error)
    if isinstance(error, KeyError):
        cause = f"the configuration lacks {cause}"
    if "unsupported dtype" in cause:
        return UnsupportedModel(
            f"{path}: MLX cannot read its weights: {cause}; convert them to BF16, F16 or F32"
        )
    config = _config(path)
    if (kind := _foreign_quantization(config, cause)) is not None:
        return UnsupportedModel(
            f"{path}: its weights are quantized ({kind}) in a form that cannot be loaded: "
            f"{cause.rstrip('.')}; {REMEDY}"
        )
    if (fault := _wrong_field(config, fields)) is not None:
        return ModelError(f"{path / 'config.json'}: {fault}; the model cannot be loaded: {cause}")
    if isinstance(error, ValueError) and "not supported" in cause.lower():
        return UnsupportedModel(f"{path}: {cause}")
    return ModelError(f"{path}: the model cannot be loaded: {cause}")


def first_line(error: Exception) -> str:
    """What an exception says, on one line of at most 300 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # The lines after "Missing 3 parameters:" name them, each with a comma.
    return " ".join(line.strip() for line in lines[:2]).removesuffix(",")[:300]


def wrong_field(path: Path, fields: type | None) -> str | None:
    """Says which field of a directory's config.json has a value of a wrong type, if one has.

    Loaders fail with such a value somewhere else, in words that do not name the field.

    Args:
        fields: see ``load_error``.
    """
    return _wrong_field(_config(path), fields)


def _wrong_field(config: Mapping[str, Any], fields: type | None) -> str | None:
    quantization = config.get("quantization")
    if quantization is not None:
        known = quantization if isinstance(quantization, dict) else {}
        if not all(type(known.get(key)) is int for key in ("group_size", "bits")):
            return (
                f"quantization is {_shown(quantization)}, not an object whose group_size and bits "
                "are whole numbers"
            )
    foreign = config.get("quantization_config")
    if foreign and not (isinstance(foreign, dict) and isinstance(foreign.get("quant_method"), str)):
        return f"quantization_config is {_shown(foreign)}, not an object with a quant_method"
    if fields is None or not dataclasses.is_dataclass(fields):
        return None
    hints = typing.get_type_hints(fields)
    for field in dataclasses.fields(fields):
        if field.name not in config:
            continue
        value = config[field.name]
        expected = _expected(hints[field.name], value)
        if expected is not None and not (value is None and field.default is None):
            return f"{field.name} is {_shown(value)}, not {expected}"
    return None


def _shown(value: object) -> str:
    """A value of a JSON file on one short line."""
    return json.dumps(value)[:80]


def _expected(hint: Any, value: object) -> str | None:
    """The kind of value that a type hint asks for; None if ``value`` is of it, or any is."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        expected = [_expected(part, value) for part in typing.get_args(hint)]
        return None if None in expected else " or ".join(dict.fromkeys(filter(None, expected)))
    kind = typing.get_origin(hint) or hint
    if kind is type(None):
        return None if value is None else "null"
    accepted, name = _KINDS.get(kind, ((object,), ""))
    is_right = isinstance(value, accepted) and (kind not in (int, float) or value is not True)
    return None if is_right else name


def _foreign_quantization(config: Mapping[str, Any], cause: str) -> str | None:
    """The name of the quantization of another tool that a directory has; None if it has none."""
    if config.get("quantization") is not None:  # mlx-lm's
        return None
    for part in (config, text_config(config)):
        found = part.get("quantization_config")
        if isinstance(found, dict) and isinstance(method := found.get("quant_method"), str):
            return f"{method:.40}"
    packed = _PACKED.search(cause)
    return None if packed is None else f"with tensors named *{packed[0]}"


def _config(path: Path) -> dict[str, Any]:
    """A directory's configuration; empty if it has none that can be read."""
    try:
        return read_config(path)
    except ModelError:
        return {}
