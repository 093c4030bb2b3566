"""The names that chat's fields have at another door, for errors that name one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from chairlift.engine.errors import RequestError


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """What is refused within names the field that this door's client has sent."""
    try:
        yield
    except RequestError as error:
        if error.param is not None and (name := names.get(error.param)) is not None:
            message = str(error)
            if message.startswith(f"{error.param}:"):
                error.args = (name + message.removeprefix(error.param),)
            error.param = name
        raise
