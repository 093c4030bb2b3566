"""Structured output in the API: the fields that ask for it, and combinations that conflict."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api.api_server import CHAT, Running, chosen, ids, running, tool
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.engine.grammar.checker import Checker
from chairlift.engine.messages import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
STRICT = json.dumps({**SCHEMA, "additionalProperties": False}, separators=(",", ":"))
NAMED = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
LOOSE = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
LARK = '?start: word\nword: "a" // ::= is not how a rule begins\n'
GBNF = 'root ::= "a" [0-9]+'


@pytest.fixture
async def server(checker: Checker) -> AsyncIterator[Running]:
    engine = FakeEngine(model_info(), lambda request, index: Scripted(ids("text")))
    async with running(engine) as server:
        vocabulary = server.service.loaded.vocabulary  # type: ignore[union-attr]
        vocabulary.grammars = checker
        yield server


REQUESTS: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": NAMED}, Grammar("json_schema", STRICT)),
    ({"response_format": LOOSE}, Grammar("json_schema", TEXT)),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"json": TEXT}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
    ({"structured_outputs": {"json_object": True, "regex": None}}, Grammar("json_object")),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, Grammar("json_schema", TEXT)),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
    # llama.cpp's and SGLang's.
    ({"json_schema": SCHEMA}, Grammar("json_schema", TEXT)),
    ({"json_schema": json.dumps(SCHEMA, indent=1)}, Grammar("json_schema", TEXT)),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        Grammar("json_schema", TEXT),
    ),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        Grammar("json_schema", TEXT),
    ),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"ebnf": LARK}, Grammar("lark", LARK)),
    ({"grammar": LARK}, Grammar("lark", LARK)),
    ({"guided_grammar": LARK}, Grammar("lark", LARK)),
    # The same grammar in two fields counts once.
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
    ({"guided_json": TEXT, "structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
    ({"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
    ({"guided_grammar": LARK, "structured_outputs": {"grammar": LARK}}, Grammar("lark", LARK)),
    ({"response_format": NAMED, "guided_json": SCHEMA}, Grammar("json_schema", STRICT)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        Grammar("json_schema", STRICT),
    ),
    ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, Grammar("regex", "a")),
]


@pytest.mark.parametrize(("fields", "grammar"), REQUESTS, ids=lambda part: str(part)[:50])
async def test_every_field_for_a_grammar_reaches_the_engine(
    server: Running, fields: dict[str, Any], grammar: Grammar
) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "Hi"})):
        status, reply = await server.post(f"/v1/{path}", {**body, **fields})
        assert status == 200, reply
        assert server.engine.submitted[-1].params.grammar == grammar


@pytest.mark.parametrize("name", ["guided_grammar", "grammar", "ebnf"])
async def test_gbnf_is_translated_to_lark(server: Running, name: str) -> None:
    assert (await server.post("/v1/chat/completions", {**CHAT, name: GBNF}))[0] == 200
    grammar = server.engine.submitted[-1].params.grammar
    assert grammar is not None
    assert (grammar.kind, "start:" in grammar.text) == ("lark", True)


TOOLS = {"tools": [tool("f")]}
CHOSEN = {**TOOLS, "tool_choice": chosen("f")}
REQUIRED = {**TOOLS, "tool_choice": "required"}
AUTO = {**TOOLS, "tool_choice": "auto"}
NONE = {**TOOLS, "tool_choice": "none"}

ALL_OUTPUT: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"choice": ["a"]}},
    {"structured_outputs": {"json_object": True}},
    {"guided_json": SCHEMA},
    {"guided_choice": ["a"]},
    {"guided_regex": "a"},
    {"guided_grammar": LARK},
    {"json_schema": SCHEMA},
    {"regex": "a"},
    {"grammar": GBNF},
    {"ebnf": LARK},
]


@pytest.mark.parametrize("fields", ALL_OUTPUT, ids=lambda part: str(part)[:50])
async def test_a_grammar_of_all_output_and_a_required_call_conflict(
    server: Running, fields: dict[str, Any]
) -> None:
    for choice in (CHOSEN, REQUIRED):
        both = {**CHAT, **choice, **fields}
        status, body = await server.post("/v1/chat/completions", both)
        name = next(iter(fields))
        assert (status, body["error"]["param"].split(".")[0]) == (400, name), body
        assert "tool_choice" in body["error"]["message"]
        # Giving the same grammar as response_format, too, does not help.
        same = {"response_format": {"type": "json_object"}}
        if "json_object" in str(fields):
            status, body = await server.post("/v1/chat/completions", {**both, **same})
            assert status == 400
    assert not server.engine.submitted


@pytest.mark.parametrize("form", [NAMED, LOOSE, {"type": "json_object"}])
async def test_a_required_call_ignores_response_format(
    server: Running, form: dict[str, Any]
) -> None:
    for choice in (CHOSEN, REQUIRED):
        grammars = []
        for more in ({}, {"response_format": form}):
            body = {**CHAT, **choice, **more}
            assert (await server.post("/v1/chat/completions", body))[0] == 200
            grammars.append(server.engine.submitted[-1].params.grammar)
        assert grammars[0] is not None
        assert grammars[0] == grammars[1]


@pytest.mark.parametrize("fields", ALL_OUTPUT, ids=lambda part: str(part)[:50])
async def test_a_grammar_beside_optional_tools(server: Running, fields: dict[str, Any]) -> None:
    """The reply is a call or follows the grammar; only JSON and choices can be combined so."""
    url = "/v1/chat/completions"
    status, body = await server.post(url, {**CHAT, **AUTO, **fields})
    if {"regex", "guided_regex", "guided_grammar", "grammar", "ebnf"} & fields.keys():
        assert (status, body["error"]["param"]) == (400, next(iter(fields))), body
    else:
        assert status == 200, body
        grammar = server.engine.submitted[-1].params.grammar
        assert grammar is not None
        assert "start: reply | open call" in grammar.text
    # With tool_choice none, the grammar alone applies.
    assert (await server.post(url, {**CHAT, **NONE, **fields}))[0] == 200
    alone = server.engine.submitted[-1].params.grammar
    assert (await server.post(url, {**CHAT, **fields}))[0] == 200
    assert server.engine.submitted[-1].params.grammar == alone


async def test_required_calls_and_formats_in_the_other_apis(server: Running) -> None:
    """Their formats apply to replies only, so a required call ignores them."""
    schema = {"type": "json_schema", "name": "it", "schema": SCHEMA}
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    requests: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (
            "/v1/responses",
            {"input": "Hi", "tools": [function], "tool_choice": {"type": "function", "name": "f"}},
            {"text": {"format": schema}},
        ),
        (
            "/v1/messages",
            {
                **CHAT,
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "tool", "name": "f"},
            },
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
    ]
    for path, body, form in requests:
        grammars = []
        for more in ({}, form):
            status, reply = await server.post(path, {**body, **more})
            assert status == 200, reply
            grammars.append(server.engine.submitted[-1].params.grammar)
        assert grammars[0] is not None
        assert grammars[0] == grammars[1]
        for name, value in (("structured_outputs", {"regex": "a"}), ("guided_regex", "a")):
            status, reply = await server.post(path, {**body, name: value})
            assert status == 400
            assert name in reply["error"]["message"]


async def test_a_text_format_sets_no_grammar(server: Running) -> None:
    await server.post("/v1/chat/completions", {**CHAT, "response_format": {"type": "text"}})
    assert server.engine.submitted[-1].params.grammar is None
