"""Types of single request fields. Fields with several forms are converted to one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any, get_args

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from chairlift.api.schemas.bounds import MAX_ENTRIES, MAX_OBJECT_VALUES, values_of
from chairlift.api.schemas.images import Detail, image_of

MAX_STOPS = 16
# Bounds the matching cost per token; real stop strings are much shorter.
MAX_STOP_CHARS = 1024
MAX_BIAS = 100.0
# Real template settings are a few switches and words.
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_BYTES = 16 << 10
MAX_BIASES = 1024
# Libraries with a depth limit encode objects as JSON again; no real schema is nested this deep.
MAX_DEPTH = 64

# The content of a message whose role requires one that it does not have.
MISSING = object()

# No model's context is longer; validating more would block all streams.
MAX_TOKENS = 1 << 20

Prompt = str | Annotated[list[int], Field(max_length=MAX_TOKENS)]


def _one_prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) > MAX_TOKENS:
        raise ValueError(f"must hold at most {MAX_TOKENS} token ids")
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise ValueError("must be a string, a list of token ids, or a list of either, not empty")


def _prompts(value: object) -> list[Prompt]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > MAX_ENTRIES:
            raise ValueError(f"must hold at most {MAX_ENTRIES} prompts")
        return [_one_prompt(one) for one in value]
    return [_one_prompt(value)]


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise ValueError(f"must hold at most {MAX_STOPS} strings")
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"every stop string must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and biases")
    if len(value) > MAX_BIASES:
        raise ValueError(f"must hold at most {MAX_BIASES} token ids")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"{key[:32]!r} is not a token id")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _template_kwargs(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if len(value) > MAX_TEMPLATE_KWARGS:
        raise ValueError(f"must hold at most {MAX_TEMPLATE_KWARGS} values")
    if not all(name.isidentifier() for name in value):
        raise ValueError("every name must be an identifier")
    if len(msgspec.json.encode(checked_size(value))) > MAX_TEMPLATE_KWARGS_BYTES:
        raise ValueError(f"must have at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON")
    return value


def _content(value: object, *kinds: str) -> str:
    """A content as one string; the texts of its parts, which are of these kinds, are joined."""
    if value is MISSING:
        raise ValueError("must be given in a message of this role")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of content parts")
    if len(value) > MAX_ENTRIES:
        raise ValueError(f"must hold at most {MAX_ENTRIES} content parts")
    return "".join(_part_text(part, kinds) for part in value)


def _part_text(part: Any, kinds: Collection[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise ValueError('every content part must be an object with a "type"')
    if kind not in kinds:
        known = " and ".join(dict.fromkeys(name for name in kinds if name != "refusal"))
        raise ValueError(f"content parts of type {kind[:32]!r} are not supported, only {known}")
    if kind == "image_url":
        image_of(part)
        return ""
    text = part.get(kind)
    if not isinstance(text, str):
        raise ValueError(f'a {kind} part must have a string "{kind}"')
    return text


def checked_size(value: dict[str, Any]) -> dict[str, Any]:
    """Returns ``value``; raises ValueError if it is nested too deeply or too large."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for parts in inner for part in parts if isinstance(part, dict | list)]
        if not level:
            if values_of(value) > MAX_OBJECT_VALUES:
                raise ValueError(f"must hold at most {MAX_OBJECT_VALUES} values")
            return value
    raise ValueError(f"must be nested at most {MAX_DEPTH} deep")


def known_kind(what: str, *kinds: str) -> Callable[[object], object]:
    """A validator that checks that an object's "type" is one of ``kinds``.

    ``what`` is the plural name of the objects, for the error.
    """

    def check(value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise ValueError('must be an object with a "type"')
        if kind not in kinds:
            raise ValueError(
                f"{what} of type {kind[:64]!r} are not supported, only {', '.join(kinds)}"
            )
        return value

    return check


_STRING = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Prompts = Annotated[
    list[Prompt],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _STRING,
                _TOKENS,
                {"type": "array", "items": _STRING, "minItems": 1},
                {"type": "array", "items": _TOKENS, "minItems": 1},
            ]
        }
    ),
]
Stops = Annotated[
    list[str],
    BeforeValidator(_stops),
    WithJsonSchema(
        {"anyOf": [_STRING, {"type": "array", "items": _STRING, "maxItems": MAX_STOPS}]}
    ),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        }
    ),
]
TemplateKwargs = Annotated[
    dict[str, Any],
    BeforeValidator(_template_kwargs),
    WithJsonSchema({"type": "object", "maxProperties": MAX_TEMPLATE_KWARGS}),
]
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _STRING},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": _STRING, "detail": {"enum": list(get_args(Detail))}},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}


def _content_schema(items: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": items}]})


# The texts of a message. ``images.placed_images`` finds the images between them.
Content = Annotated[
    str,
    BeforeValidator(lambda value: _content(value, "text", "image_url", "refusal")),
    _content_schema({"anyOf": [_TEXT_PART, _IMAGE_PART]}),
]
TextContent = Annotated[
    str, BeforeValidator(lambda value: _content(value, "text")), _content_schema(_TEXT_PART)
]
JsonObject = Annotated[dict[str, Any], AfterValidator(checked_size)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


# Pairs of an object's metadata.
MAX_METADATA = 16


def _check_size(value: object) -> object:
    # Runs before pydantic validates each pair, of which there may be a million.
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"must hold at most {MAX_METADATA} pairs")
    return value


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(_check_size),
]
