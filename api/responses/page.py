"""Pages of a list of items, by OpenAI's query fields ``limit``, ``order`` and ``after``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chairlift.api.responses.items import Item
from chairlift.api.responses.replies import InputItemList
from chairlift.api.schemas.paging import ends_of, page_of, query_schema
from chairlift.engine.errors import RequestError

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
# JSON schemas of the query's fields.
QUERY = query_schema(DEFAULT_LIMIT, MAX_LIMIT)


def item_page(items: Sequence[Item], query: Mapping[str, str]) -> InputItemList:
    """The page of ``items`` that ``query`` selects, the newest first unless ``order`` is asc.

    Raises:
        RequestError: the value of a field is invalid.
    """
    limit, after, newest_first = page_of(query, DEFAULT_LIMIT, MAX_LIMIT)
    ordered = list(reversed(items)) if newest_first else list(items)
    if after is not None:
        ids = [item.id for item in ordered]
        if after not in ids:
            raise RequestError(f"after: there is no item {after[:64]!r}", "after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    first, last = ends_of([item.id for item in page])
    return InputItemList(page, first, last, len(ordered) > len(page))
