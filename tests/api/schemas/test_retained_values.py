"""A parsed request keeps few objects, however many values the body gives to any of its fields.

A worker process parses large bodies and sends the result to the API process, where creating the
objects blocks all streams.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pydantic
import pytest
from pydantic import BaseModel

from chairlift.api.errors import problem_of
from chairlift.api.schemas.bounds import MAX_OBJECT_VALUES
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.schemas import parse
from chairlift.api.server.routes import ROUTES
from chairlift.engine.errors import RequestError

KINDS = sorted({r.request for r in ROUTES if r.request is not None}, key=lambda kind: kind.__name__)
REQUIRED = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "max_tokens": 8,
    "tokens": [1],
}
VALUES = {
    "a list": b"[" + b'{"type":"x"},' * (MAX_OBJECT_VALUES // 2) + b"{}]",
    "an object": b'{"a":[' + b"{}," * MAX_OBJECT_VALUES + b"{}]}",
}


def objects(value: object) -> int:
    """The number of objects in a value, through models, lists and mappings; numbers are cheap."""
    count, level = 0, [value]
    while level:
        count += sum(not isinstance(one, int | float) for one in level)
        inner: list[object] = []
        for one in level:
            if isinstance(one, BaseModel):
                inner += [*one.__dict__.values(), *(one.model_extra or {}).values()]
            elif isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list | tuple):
                inner += one
        level = inner
    return count


def bodies(kind: type[Request]) -> Iterator[tuple[str, bytes]]:
    fields = kind.model_fields
    required = {name: REQUIRED[name] for name in REQUIRED if name in fields}
    if kind.__name__ == "TokenizeRequest":
        del required["messages"]
    for name in (*fields, "unknown"):
        rest = {key: value for key, value in required.items() if key != name}
        opened = msgspec.json.encode(rest)[:-1] + (b"," if rest else b"")
        for shape, value in VALUES.items():
            yield f"{shape} as {name}", opened + f'"{name}":'.encode() + value + b"}"


def assert_short(error: Exception) -> None:
    """NOTE: ``str`` of pydantic's errors takes long: it shows all of the input before it is cut."""
    assert len(problem_of(error).message) < 10_000
    if isinstance(error, pydantic.ValidationError):
        assert error.error_count() < 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_no_field_retains_many_objects(kind: type[Request]) -> None:
    retained = {}
    for name, body in bodies(kind):
        try:
            retained[name] = objects(parse(kind, body))
        except (RequestError, pydantic.ValidationError) as error:
            assert_short(error)
    assert {name: count for name, count in retained.items() if count > MAX_OBJECT_VALUES // 2} == {}
