"""The place that an error names is the path of the wrong value in the client's own JSON."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import MESSAGES, tool

from chairlift.api.anthropic.request import MessagesRequest
from chairlift.api.errors import problem_of
from chairlift.api.ollama.request import OllamaChatRequest, OllamaEmbedRequest
from chairlift.api.responses.request import ResponsesRequest
from chairlift.api.schemas.decoding import place_in
from chairlift.api.schemas.schemas import ChatRequest, parse

LIMITED = {"messages": MESSAGES, "max_tokens": 1}
CASES: list[tuple[Any, dict[str, Any], str, str]] = [
    (ChatRequest, {"messages": [5]}, "messages[0]", "must be an object"),
    (ChatRequest, {"messages": MESSAGES, "response_format": "json"}, "response_format", "object"),
    (ChatRequest, {"messages": MESSAGES, "stream_options": 5}, "stream_options", "be an object"),
    (
        ChatRequest,
        {"messages": MESSAGES, "tools": [tool("f"), {"type": "function", "function": {}}]},
        "tools[1].function.name",
        "required",
    ),
    (MessagesRequest, {**LIMITED, "tool_choice": {"type": "tool"}}, "tool_choice.name", "required"),
    (
        MessagesRequest,
        {**LIMITED, "thinking": {"type": "enabled", "budget_tokens": 0}},
        "thinking.budget_tokens",
        "from 1",
    ),
    (
        MessagesRequest,
        {**LIMITED, "messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
        "valid string",
    ),
    (
        MessagesRequest,
        {**LIMITED, "system": [{"type": "text", "text": "a"}, {"type": "text"}]},
        "system[1].text",
        "required",
    ),
    (ResponsesRequest, {"input": [{"role": "user", "content": None}]}, "input[0].content", "requ"),
    (
        ResponsesRequest,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": None}]},
        "input[0].output",
        "required",
    ),
    (
        ResponsesRequest,
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": 5}}},
        "text.format.schema",
        "must be an object",
    ),
    (OllamaChatRequest, {"think": "deeply"}, "think", 'must be true, false, "low", "medium", '),
    (OllamaEmbedRequest, {"input": ["a", 1]}, "input", "must be a string or a list of strings"),
    (OllamaEmbedRequest, {"input": 5}, "input", "must be a string or a list of strings"),
]


@pytest.mark.parametrize(("kind", "body", "place", "message"), CASES)
def test_the_place_and_the_message(
    kind: Any, body: dict[str, Any], place: str, message: str
) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        parse(kind, json.dumps(body).encode())
    problem = problem_of(caught.value)
    assert (problem.status, problem.param) == (400, place)
    assert problem.message.startswith(f"{place}: ")
    assert message in problem.message


NAMES = st.sampled_from(["a", "b", "type"])
DOCUMENTS = st.recursive(
    st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(DOCUMENTS, st.data())
def test_kinds_are_left_out_of_any_path(document: Any, data: st.DataObject) -> None:
    path: list[int | str] = []
    location: list[int | str] = []
    value = document
    while isinstance(value, dict | list) and value:
        if isinstance(value, dict) and data.draw(st.booleans()):
            location.append("a kind")
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        key = data.draw(st.sampled_from(keys))
        path.append(key)
        location.append(key)
        value = value[key]
    assert place_in(document, tuple(location)) == tuple(path)
