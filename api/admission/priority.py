"""A request's priority class, from the field ``priority`` or else the header ``X-Priority``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from chairlift.api.schemas.schemas import EngineRequest
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import MAX_PRIORITY

HEADER = "X-Priority"
DEFAULT = 0
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")


def priority_of(request: EngineRequest, headers: Mapping[str, str]) -> int:
    """The request's priority class; lower runs earlier.

    Raises:
        RequestError: the field is absent, and the header is not an integer in range.
    """
    if request.priority is not None:
        return request.priority
    given = headers.get(HEADER)
    if given is None:
        return DEFAULT
    if not _NUMBER.fullmatch(given) or abs(int(given)) > MAX_PRIORITY:
        raise RequestError(
            f"{HEADER}: must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, "
            f"not {given[:32]!r}",
            HEADER,
        )
    return int(given)
