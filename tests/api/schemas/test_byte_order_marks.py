"""A byte order mark before the JSON of a body, of a batch's line or of a schema changes nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.api.api_server import CHAT, Running, engine_replying, running
from support.api.fields import BODIES

from chairlift.api.cluster.prompts import read_body
from chairlift.api.openai.batches.lines import LineRules, parse_line, validate

MARK = b"\xef\xbb\xbf"
RULES = LineRules("/v1/completions", None, 1000, 10)
LINE = json.dumps(
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
).encode()


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


async def answer(server: Running, path: str, body: bytes) -> tuple[int, str | None]:
    headers = {"Content-Type": "application/json", "X-Request-Id": "a"}
    async with server.http.post(server.url + path, data=body, headers=headers) as response:
        reply = await response.text()
        return response.status, reply if response.status >= 400 else None


async def test_before_a_body(server: Running) -> None:
    for path, value in BODIES.items():
        body = json.dumps(value).encode()
        assert await answer(server, path, MARK + body) == await answer(server, path, body)
        for invalid in (b"", b"[]", b"{"):
            status, error = await answer(server, path, MARK + invalid)
            assert (status, error) == await answer(server, path, invalid)
            assert status == 400
        # Only one, and only at the start.
        for wrong in (MARK + MARK + body, body + MARK, b" " + MARK + body):
            assert (await answer(server, path, wrong))[0] == 400


async def test_before_a_body_of_any_form(server: Running) -> None:
    large = {**CHAT, "user": "x" * 100_000}
    many = {**CHAT, "metadata": None, "unknown": [0] * 20_000}
    for body in (large, many):
        text = MARK + json.dumps(body).encode()
        assert (await server.post("/v1/chat/completions", text))[0] == 200
    packed = gzip.compress(MARK + json.dumps(CHAT).encode())
    headers = {"Content-Encoding": "gzip"}
    assert (await server.post("/v1/chat/completions", packed, **headers))[0] == 200


async def test_before_a_schema_in_a_text(server: Running) -> None:
    text = '{"type": "object", "properties": {}}'
    for field in ("json_schema", "guided_json"):
        for mark in ("", MARK.decode()):
            body = {"prompt": "x", field: mark + text}
            assert (await server.post("/v1/completions", body))[0] == 200
    grammars = {request.params.grammar for request in server.engine.submitted}
    assert len(grammars) == 1


def test_before_the_lines_of_a_batch(tmp_path: Path) -> None:
    assert parse_line(1, MARK + LINE, RULES) == parse_line(1, LINE, RULES)
    file = tmp_path / "lines"
    file.write_bytes(MARK + LINE + b"\n\n" + LINE.replace(b'"a"', b'"b"') + b"\n")
    assert validate(file, RULES) == (2, [])
    file.write_bytes(MARK + b"\r\n")
    assert [error.code for error in validate(file, RULES).errors] == ["empty_file"]


def test_before_a_body_at_the_ingress() -> None:
    body = b'{"model": "m", "prompt": "x"}'
    assert read_body(MARK + body) == read_body(body)
