"""The names that chat's fields have at this door, for errors that name one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from chairlift.engine.errors import RequestError

_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@contextmanager
def in_this_doors_names() -> Iterator[None]:
    """What is refused within names the field that this door's client sent."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            error.param = _NAMES.get(error.param, error.param)
        raise
