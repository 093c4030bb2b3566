"""Types of declared fields without effect: ignored, or refused unless the value is neutral.

The models of the Messages and Responses APIs declare such fields of their own API with these types,
also in nested objects: the OpenAPI document lists them, and an error names the place. All other
fields without effect, those of OpenAI's other endpoints and of other servers, are in the tables
that ``unsupported`` reads. docs/reference/fields.md shows both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

IGNORED = "Taken, and without effect."
NOT_SUPPORTED = "Not supported."


def _nothing(value: object) -> None:
    """Drops a value, which may be as large as the body."""


# A field that cannot change the reply; always None.
Ignored = Annotated[Any, BeforeValidator(_nothing), WithJsonSchema({"description": IGNORED})]


def only(*neutral_values: object) -> tuple[BeforeValidator, WithJsonSchema]:
    """The annotations of a field that accepts only neutral values, which change nothing.

    null is always one of them. Types count: False is not 0.
    """
    return (
        BeforeValidator(_check_of(neutral_values)),
        WithJsonSchema({"enum": [*neutral_values, None], "description": NOT_SUPPORTED}),
    )


def is_one_of(value: object, neutral_values: Iterable[object]) -> bool:
    """Whether ``value`` equals a neutral value and has its type: False is not 0."""
    return any(type(value) is type(neutral) and value == neutral for neutral in neutral_values)


def _check_of(neutral_values: tuple[object, ...]) -> Callable[[object], object]:
    accepted = " or ".join(map(json.dumps, neutral_values))

    def check(value: object) -> object:
        if not is_one_of(value, neutral_values):
            only_these = f", only {accepted}" if accepted else ""
            raise ValueError(f"is not supported{only_these}")
        return value

    return check


def _includes_direct(callers: list[str]) -> list[str]:
    if "direct" not in callers:
        raise ValueError('must contain "direct": this server runs no code that could call')
    return callers


# The callers of a tool; here only the model can call.
Callers = Annotated[list[str], AfterValidator(_includes_direct)]
