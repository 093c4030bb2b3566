"""Pages of lists, by OpenAI's query fields ``limit``, ``order`` and ``after``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chairlift.engine.errors import RequestError

_LIMIT = re.compile(r"[0-9]{1,5}")


class Page(NamedTuple):
    """The page that a client asks for.

    Attributes:
        limit: the maximum number of entries.
        after: the id of the entry before the page; None means the first page.
        newest_first: whether newer entries come first.
    """

    limit: int
    after: str | None = None
    newest_first: bool = True

    @property
    def in_sql(self) -> tuple[str, str]:
        """The direction of increasing numbers, and how those after ``after`` compare with its."""
        return ("DESC", "<") if self.newest_first else ("ASC", ">")


def page_of(query: Mapping[str, str], default: int, most: int) -> Page:
    """Parses a request's query.

    Raises:
        RequestError: a value is invalid.
    """
    limit = query.get("limit", str(default))
    if not (_LIMIT.fullmatch(limit) and 1 <= int(limit) <= most):
        raise RequestError(f"limit: must be a whole number from 1 to {most}", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order: must be asc or desc", "order")
    return Page(int(limit), query.get("after"), order == "desc")


def query_schema(default: int, most: int) -> dict[str, dict[str, object]]:
    """The JSON schemas of ``limit``, ``order`` and ``after``."""
    return {
        "limit": {"type": "integer", "minimum": 1, "maximum": most, "default": default},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string"},
    }


def ends_of(ids: Sequence[str | None]) -> tuple[str | None, str | None]:
    """The first and the last id of a page; null if it is empty."""
    return (ids[0], ids[-1]) if ids else (None, None)
