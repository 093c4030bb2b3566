"""Structured output that continues the last message: both together have the required form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from support.api import harmony
from support.api.api_server import CHAT, MESSAGES, Running, running, tool
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info
from support.engine.grammars import shortest_reply

from chairlift.engine.grammar.checker import Checker
from chairlift.engine.grammar.language import lexicon
from chairlift.engine.messages import Grammar, Submit
from chairlift.engine.workers.pool import Workers

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "kind": {"const": "<|im_end|>"}},
    "required": ["city", "kind"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
CHAT_PATH, MESSAGES_PATH = "/v1/chat/completions", "/v1/messages"
TEXTS = ["{", '{"ci', '{"city": "Zür', '{"city": "\\u00e9', '\n{\t"city" : "a",', '{"city":"","k']


@pytest.fixture(params=["plain", "thinking", "harmony"])
async def server(request: pytest.FixtureRequest, workers: Workers) -> AsyncIterator[Running]:
    """A server whose engine writes the shortest reply that the grammar allows."""
    tokenizer = {
        "plain": byte_tokenizer(),
        "thinking": byte_tokenizer(special=["<think>", "</think>"]),
        "harmony": harmony.TOKENIZER,
    }[request.param]
    size = len(tokenizer)
    known = lexicon(tokenizer, size)
    loaded = known.load()

    def reply(submit: Submit, index: int) -> Scripted:
        grammar = submit.params.grammar
        assert grammar is not None
        return Scripted([*shortest_reply(loaded, grammar), known.ends[0]], ended_by_token=True)

    async with running(FakeEngine(model_info(vocab_size=size), reply), tokenizer) as server:
        server.service.loaded.vocabulary.grammars = Checker(  # type: ignore[union-attr]
            lambda: known, workers
        )
        yield server


def last_grammar(server: Running) -> Grammar:
    grammar = server.engine.submitted[-1].params.grammar
    assert grammar is not None
    return grammar


def continuing(text: str, **fields: Any) -> dict[str, Any]:
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    return {**CHAT, "messages": messages, "continue_final_message": True, **fields}


def check_complete(text: str, replies: Sequence[str]) -> None:
    for reply in replies:
        value = json.loads(text + reply)
        assert set(value) == {"city", "kind"}
        assert value["kind"] == "<|im_end|>"


@pytest.mark.parametrize("text", TEXTS)
async def test_chat_completions_and_messages_complete_the_text(server: Running, text: str) -> None:
    status, reply = await server.post(CHAT_PATH, continuing(text, response_format=FORM, n=2))
    assert status == 200, reply
    check_complete(text, [choice["message"]["content"] for choice in reply["choices"]])
    assert last_grammar(server).begun == text
    body = {
        "max_tokens": 50,
        "messages": [*MESSAGES, {"role": "assistant", "content": text}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    status, reply = await server.post(MESSAGES_PATH, body)
    assert status == 200, reply
    check_complete(text, [reply["content"][0]["text"]])


async def test_a_new_message_begins_the_text(server: Running) -> None:
    status, reply = await server.post(CHAT_PATH, {**CHAT, "response_format": FORM})
    assert status == 200, reply
    assert last_grammar(server).begun == ""


@pytest.mark.parametrize(
    ("text", "character"), [("Sure: {", 1), ('{"city": 5', 10), ('{"city": "", "x', 15)]
)
async def test_a_text_that_departs_from_the_form_is_refused(
    server: Running, text: str, character: int
) -> None:
    status, reply = await server.post(CHAT_PATH, continuing(text, response_format=FORM))
    assert (status, reply["error"]["param"]) == (400, "messages")
    assert reply["error"]["message"] == (
        "messages: the reply cannot continue the last message: the text so far departs from the "
        f"required form at character {character}"
    )
    assert not server.engine.submitted
    # The same text is fine without a form, and where it fits.
    fields = {"structured_outputs": {"regex": "(?s:.*)"}}
    assert (await server.post(CHAT_PATH, continuing(text, **fields)))[0] == 200


@pytest.mark.parametrize("server", ["thinking"], indirect=True)
async def test_a_thought_before_the_text_does_not_count(server: Running) -> None:
    for content, text in {
        '<think>Hm {</think>\n\n{"ci': '{"ci',
        "<think>Hm</think>\n\n": "",
        '<think>Hm {"ci': "",
    }.items():
        status, reply = await server.post(CHAT_PATH, continuing(content, response_format=FORM))
        assert status == 200, reply
        assert last_grammar(server).begun == text
        assert (server.engine.submitted[-1].params.thinking is None) == ("</think>" in content)


async def test_functions_that_may_be_called(server: Running) -> None:
    fields = {"tools": [tool("f")], "response_format": FORM}
    status, reply = await server.post(CHAT_PATH, continuing('{"city":', **fields))
    assert status == 200, reply
    (choice,) = reply["choices"]
    check_complete('{"city":', [choice["message"]["content"]])
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("server", ["plain"], indirect=True)
async def test_a_required_call_comes_after_the_text(server: Running) -> None:
    fields = {"tools": [tool("f")], "tool_choice": "required", "response_format": FORM}
    status, reply = await server.post(CHAT_PATH, continuing("Let me see. ", **fields))
    assert status == 200, reply
    assert (last_grammar(server).kind, last_grammar(server).begun) == ("lark", "")


@pytest.mark.parametrize("server", ["harmony"], indirect=True)
async def test_harmony_cannot_call_within_a_message(server: Running) -> None:
    fields = {"tools": [tool("f")], "tool_choice": "required"}
    status, reply = await server.post(CHAT_PATH, continuing("Let me see. ", **fields))
    assert (status, reply["error"]["param"]) == (400, "tool_choice")
