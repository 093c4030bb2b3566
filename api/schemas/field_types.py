"""Fields of other servers that a request may hold: ignored, or refused unless they ask for nothing.

A model declares each by name, so that the OpenAPI document lists it and an error names its place.
``api/schemas/unsupported.py`` is for those that a model does not declare.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

# What it says cannot change the reply.
Ignored = Annotated[Any, WithJsonSchema({"description": "Taken, and without effect."})]


def only(*nothings: object) -> tuple[BeforeValidator, WithJsonSchema]:
    """The annotations of a field that only takes ``nothings``, the values that ask for nothing.

    null is always one of them. Types count: False is not 0.
    """
    return (
        BeforeValidator(_check_of(nothings)),
        WithJsonSchema({"enum": [*nothings, None], "description": "Not supported."}),
    )


def _check_of(nothings: tuple[object, ...]) -> Callable[[object], object]:
    taken = " or ".join(json.dumps(nothing) for nothing in nothings)

    def check(value: object) -> object:
        if not any(type(value) is type(nothing) and value == nothing for nothing in nothings):
            raise ValueError(f"is not supported, only {taken}" if taken else "is not supported")
        return value

    return check


def _includes_direct(callers: list[str]) -> list[str]:
    if "direct" not in callers:
        raise ValueError('must hold "direct": this server runs no code that could call')
    return callers


# Who may call a tool. Here it is the model or nobody.
Callers = Annotated[list[str], AfterValidator(_includes_direct)]
