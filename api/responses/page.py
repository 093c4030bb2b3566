"""Pages of a list of items, by OpenAI's query fields ``limit``, ``order`` and ``after``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from chairlift.api.responses.items import Item
from chairlift.api.responses.replies import InputItemList
from chairlift.engine.errors import RequestError

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
# JSON schemas of the query's fields.
QUERY: Mapping[str, Mapping[str, object]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
_LIMIT = re.compile(r"[0-9]{1,3}")


def page_of(items: Sequence[Item], query: Mapping[str, str]) -> InputItemList:
    """The page of ``items`` that ``query`` selects, the newest first unless ``order`` is asc.

    Raises:
        RequestError: the value of a field is invalid.
    """
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (_LIMIT.fullmatch(limit) and 1 <= int(limit) <= MAX_LIMIT):
        raise RequestError(f"limit: must be a whole number from 1 to {MAX_LIMIT}", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order: must be asc or desc", "order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if (after := query.get("after")) is not None:
        ids = [item.id for item in ordered]
        if after not in ids:
            raise RequestError(f"after: there is no item {after[:64]!r}", "after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    return InputItemList(
        page,
        page[0].id if page else None,
        page[-1].id if page else None,
        len(ordered) > len(page),
    )
