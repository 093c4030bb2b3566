"""Schemas of replies and tools that are no JSON schemas: a 400 that names the place."""

from __future__ import annotations

from typing import Any

import pytest
from support.api.api_server import engine_replying, running

BAD = {"type": "object", "properties": {"a": {"type": "object", "required": [["b"]]}}}
PLACE = "#/properties/a/required must be an array of strings"


def _messages() -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi"}]


def _format(strict: bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": strict, "schema": BAD}}


FUNCTION = {"name": "f", "parameters": BAD}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"response_format": _format(False)}),
    "strict chat": ("/v1/chat/completions", {"response_format": _format(True)}),
    "guided": ("/v1/chat/completions", {"guided_json": BAD}),
    "tools": (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    ),
    "messages": (
        "/v1/messages",
        {"max_tokens": 5, "tools": [{"name": "f", "input_schema": BAD}]}
        | {"tool_choice": {"type": "any"}},
    ),
    "responses": (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}},
    ),
    "ollama": ("/api/chat", {"format": BAD, "stream": False}),
}


@pytest.mark.parametrize("name", BODIES)
async def test_the_error_names_the_place(name: str) -> None:
    path, fields = BODIES[name]
    turns = {"input": "hi"} if path == "/v1/responses" else {"messages": _messages()}
    async with running(engine_replying("{}")) as server:
        status, reply = await server.post(path, {"model": "org/tiny", **turns, **fields})
    assert status == 400
    assert PLACE in str(reply)
