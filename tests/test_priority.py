"""Classes of requests over HTTP: the field, the header, and what a full queue tells each."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from api_server import CHAT, Running, ending, running
from fake_engine import FakeEngine, model_info

BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "x"}}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(model_info(), ending("Hi"))) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "header", "priority"),
    [
        ({}, {}, 0),
        ({"priority": None}, {}, 0),
        ({"priority": 7}, {}, 7),
        ({"priority": -100}, {}, -100),
        ({}, {"X-Priority": "-5"}, -5),
        ({}, {"x-priority": "100"}, 100),
        ({"priority": 0}, {"X-Priority": "3"}, 0),
        ({"priority": 2}, {"X-Priority": "urgent"}, 2),
    ],
)
async def test_the_class_reaches_the_engine_and_the_body_wins(
    server: Running,
    path: str,
    field: dict[str, int | None],
    header: dict[str, str],
    priority: int,
) -> None:
    status, _ = await server.post(path, {**BODIES[path], **field}, **header)
    assert status == 200
    assert [submit.priority for submit in server.engine.submitted] == [priority]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("given", ["", "high", "1.5", "101", "-101", "9" * 400, "0x1", "\u0661"])
async def test_a_bad_header_is_named(server: Running, path: str, given: str) -> None:
    status, body = await server.post(path, BODIES[path], **{"X-Priority": given})
    assert (status, body["error"]["param"]) == (400, "X-Priority")
    assert "-100 to 100" in body["error"]["message"]
    assert not server.engine.submitted


async def test_the_header_is_documented(server: Running) -> None:
    _, document = await server.get("/openapi.json")
    for path in BODIES:
        (parameter,) = document["paths"][path]["post"]["parameters"]
        assert (parameter["name"], parameter["in"]) == ("X-Priority", "header")
        assert (parameter["schema"]["minimum"], parameter["schema"]["maximum"]) == (-100, 100)
    assert "parameters" not in document["paths"]["/tokenize"]["post"]
