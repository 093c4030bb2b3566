"""Translates field names in errors: from those of a chat request to those of another API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from chairlift.engine.errors import RequestError


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field that a RequestError of the ``with`` block names, as in ``names``.

    The Messages and Responses APIs convert requests to chat requests, but their clients know only
    the fields that they have sent.
    """
    try:
        yield
    except RequestError as error:
        if error.param is not None and (name := names.get(error.param)) is not None:
            message = str(error)
            if message.startswith(f"{error.param}:"):
                error.args = (name + message.removeprefix(error.param),)
            error.param = name
        raise
