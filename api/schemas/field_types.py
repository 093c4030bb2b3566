"""Types of fields from other servers: ignored, or refused unless the value is neutral.

A model declares each by name, so that the OpenAPI document lists it and an error names its place.
``api/schemas/unsupported.py`` handles fields that a model does not declare.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

IGNORED = "Taken, and without effect."
NOT_SUPPORTED = "Not supported."

# A field that cannot change the reply.
Ignored = Annotated[Any, WithJsonSchema({"description": IGNORED})]


def only(*neutral_values: object) -> tuple[BeforeValidator, WithJsonSchema]:
    """The annotations of a field that accepts only neutral values, which ask for nothing.

    null is always one of them. Types count: False is not 0.
    """
    return (
        BeforeValidator(_check_of(neutral_values)),
        WithJsonSchema({"enum": [*neutral_values, None], "description": NOT_SUPPORTED}),
    )


def _check_of(neutral_values: tuple[object, ...]) -> Callable[[object], object]:
    taken = " or ".join(json.dumps(nothing) for nothing in neutral_values)

    def check(value: object) -> object:
        if not any(type(value) is type(nothing) and value == nothing for nothing in neutral_values):
            raise ValueError(f"is not supported, only {taken}" if taken else "is not supported")
        return value

    return check


def _includes_direct(callers: list[str]) -> list[str]:
    if "direct" not in callers:
        raise ValueError('must hold "direct": this server runs no code that could call')
    return callers


# The callers of a tool; here only the model can call.
Callers = Annotated[list[str], AfterValidator(_includes_direct)]
