"""Expected outcomes of the fields of other servers' APIs, tried by ``test_declared_fields.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["done", "ignored", "refused"]


@dataclass(frozen=True)
class FieldCase:
    """A field in a request, and its outcome.

    Attributes:
        name: the field, or a kind of object in it ("tools: web_search"), as the docs name it.
        outcome: "done" changes the prompt, the sampling or the reply; "ignored" changes nothing;
            "refused" is an error reply.
        body: the part of the request that contains the field.
        context: other fields that the request needs.
        message: a part of the error's message or param, if the field is refused.
    """

    name: str
    outcome: Outcome
    body: dict[str, Any]
    context: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.outcome}"


def done(name: str, body: dict[str, Any], **context: Any) -> FieldCase:
    return FieldCase(name, "done", body, context)


def ignored(name: str, body: dict[str, Any], **context: Any) -> FieldCase:
    return FieldCase(name, "ignored", body, context)


def refused(name: str, message: str, body: dict[str, Any], **context: Any) -> FieldCase:
    return FieldCase(name, "refused", body, context, message)
