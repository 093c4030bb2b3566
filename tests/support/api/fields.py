"""What becomes of each field of another server's API, as data; ``test_fields.py`` tries it all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["done", "ignored", "refused"]


@dataclass(frozen=True)
class Tried:
    """``name`` is the field's, or that of a kind of objects in it ("tools: web_search"), as the
    docs have it.

    ``body`` holds it, ``beside`` what else the request needs. "done" changes the prompt, the
    sampling or the reply; "ignored" changes nothing; "refused" is a 400 with ``named`` in it.
    """

    name: str
    outcome: Outcome
    body: dict[str, Any]
    beside: dict[str, Any] = field(default_factory=dict)
    named: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.outcome}"


def done(name: str, body: dict[str, Any], **beside: Any) -> Tried:
    return Tried(name, "done", body, beside)


def ignored(name: str, body: dict[str, Any], **beside: Any) -> Tried:
    return Tried(name, "ignored", body, beside)


def refused(name: str, named: str, body: dict[str, Any], **beside: Any) -> Tried:
    return Tried(name, "refused", body, beside, named)
