"""The sampling fields whose default is the model's: their types, and the defaults of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import pydantic
from msgspec import Struct
from msgspec.structs import fields, replace
from pydantic import Field, TypeAdapter

from chairlift.engine.errors import ModelError
from chairlift.engine.hub.generation_config import (
    KEYS,
    OVERRIDE_FLAG,
    Found,
    GenerationConfig,
    end_token_ids,
    found_in,
)

# The page of the request fields and the API reference recognize these fields by this description.
MODEL_DEFAULT = "The default is the model's: default_sampling_params in GET /v1/models."

_Temperature = Annotated[float, Field(ge=0, le=2)]
_TopP = Annotated[float, Field(ge=0, le=1)]
_TopK = Annotated[int, Field(ge=-1, lt=2**31)]
_MinP = Annotated[float, Field(ge=0, le=1)]
_RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]

# Fields of requests; None means the model's default.
Temperature = Annotated[_Temperature | None, Field(description=MODEL_DEFAULT)]
TopP = Annotated[_TopP | None, Field(description=MODEL_DEFAULT)]
TopK = Annotated[_TopK | None, Field(description=MODEL_DEFAULT)]
MinP = Annotated[_MinP | None, Field(description=MODEL_DEFAULT)]
RepetitionPenalty = Annotated[_RepetitionPenalty | None, Field(description=MODEL_DEFAULT)]

_ADAPTERS: Mapping[str, TypeAdapter[Any]] = {
    "temperature": TypeAdapter(_Temperature),
    "top_p": TypeAdapter(_TopP),
    "top_k": TypeAdapter(_TopK),
    "min_p": TypeAdapter(_MinP),
    "repetition_penalty": TypeAdapter(_RepetitionPenalty),
}


class SamplingFields(Protocol):
    """A request's sampling fields; None means the model's default."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None


class SamplingDefaults(Struct, frozen=True):
    """The sampling of requests that give no value of their own. The values here are neutral."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def overridden_by(self, request: SamplingFields) -> SamplingDefaults:
        """The request's values, and these for the fields that it leaves out."""
        given = {name: getattr(request, name) for name in _ADAPTERS}
        return replace(self, **{name: v for name, v in given.items() if v is not None})

    def __str__(self) -> str:
        """The values that are not neutral, like "temperature 0.2, top_p 0.9", or "neutral"."""
        values = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        texts = [f"{name} {value:g}" for name, value, neutral in values if value != neutral]
        return ", ".join(texts) or "neutral"


def sampling_defaults(found: Mapping[str, Found]) -> SamplingDefaults:
    """The defaults with the values of a generation config, each within its request field's range.

    Raises:
        ModelError: a value has another type, or is out of range; the text names file and key.
    """
    return SamplingDefaults(
        **{name: _checked(name, found[name]) for name in _ADAPTERS if name in found}
    )


def check_override(values: Mapping[str, Any]) -> None:
    """Checks the values of --override-generation-config.

    Raises:
        ValueError: a key is unknown, or a value has another type or is out of range.
    """
    for name in values:
        if name not in KEYS:
            raise ValueError(
                f"{OVERRIDE_FLAG}: unknown key {name[:64]!r}, not one of {', '.join(KEYS)}"
            )
    config = GenerationConfig(found_in(values, OVERRIDE_FLAG), OVERRIDE_FLAG)
    try:
        sampling_defaults(config.values)
        end_token_ids(config)
    except ModelError as error:
        raise ValueError(str(error)) from error


def _checked(name: str, found: Found) -> Any:
    value = found.value
    if name == "top_k" and isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return _ADAPTERS[name].validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Input ")
        flagged = found.place.startswith(OVERRIDE_FLAG)
        remedy = "" if flagged else f"; {OVERRIDE_FLAG} '{{\"{name}\": …}}' replaces it"
        raise ModelError(f"{found.place} is {value!r:.64}, but {reason}{remedy}") from None
