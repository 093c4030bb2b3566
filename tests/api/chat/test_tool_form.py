"""Calls that a grammar ensures, in JSON: for models without a format of their own, and with one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.api.api_server import MESSAGES, TOKENIZER, Running, chosen, running, tool
from support.api.fake_engine import byte_tokenizer
from support.api.tool_calls import (
    BODY,
    CALLED,
    CLOCK,
    JSON,
    PATH,
    PYTHONIC,
    RESULT,
    TOKENIZERS,
    WEATHER,
    arguments,
    both,
    writing,
)

from chairlift.api.chat.tool_plan import MAX_CONSTRAINED_CALLS
from chairlift.engine.grammar.language import compiled, lexicon
from chairlift.engine.messages import Grammar

CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich}}", "days": 3}}'
    "\n</tool_call>"
)
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@cache
def vocabulary(tokenizer: TokenizerWrapper) -> LLTokenizer:
    return lexicon(tokenizer, len(tokenizer)).load()


def allows(grammar: Grammar, text: str, tokenizer: TokenizerWrapper) -> bool:
    """Whether a reply may be ``text``, and end there."""
    matcher = compiled(grammar, vocabulary(tokenizer))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@asynccontextmanager
async def held(
    text: str, tokenizer: TokenizerWrapper, chunk: int = 1, **ending: Any
) -> AsyncIterator[Running]:
    """A server whose model writes ``text``, and which tries grammars in this process."""

    async def check(grammar: Grammar) -> None:
        compiled(grammar, vocabulary(tokenizer))

    async with running(writing(tokenizer, text, chunk, **ending), tokenizer) as server:
        server.service.model().vocabulary.grammars.check = check  # type: ignore[method-assign]
        yield server


def asked(server: Running) -> Grammar:
    grammar = server.engine.submitted[-1].params.grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("chunk", [1, 9])
@pytest.mark.parametrize("tokenizer", [TOKENIZER, JSON], ids=["none", "json_tools"])
async def test_calls_are_streamed_as_they_are_written(
    tokenizer: TokenizerWrapper, chunk: int
) -> None:
    async with held(f"{CALL}\n{OTHER}", tokenizer, chunk) as server:
        body = {**BODY, "tool_choice": "required"}
        reply = await both(server, body)
        assert (reply.content, reply.finish) == ("", "tool_calls")
        assert [call["name"] for call in reply.calls] == ["get_weather", "clock"]
        assert arguments(reply.calls[0]) == {"city": "Zürich}}", "days": 3}
        assert reply.calls[1]["arguments"] == "{}"
        assert allows(asked(server), f"{CALL}\n{OTHER}", tokenizer)
        chunks = await server.chunks(PATH, body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        parts = [
            call["function"]["arguments"]
            for delta in deltas
            for call in delta.get("tool_calls", ())
            if call["index"] == 0
        ]
        assert len(parts) > (20 if chunk == 1 else 3)


async def test_what_each_choice_of_tools_allows() -> None:
    for tokenizer in (TOKENIZER, JSON, PYTHONIC, TOKENIZERS["glm47"]):
        async with held(CALL, tokenizer) as server:
            single = {"parallel_tool_calls": False}
            for choice, fields, allowed in (
                ("required", {}, {CALL, OTHER, f"{CALL}\n{OTHER}", f"{OTHER}\n{OTHER}"}),
                ("required", single, {CALL, OTHER}),
                (chosen("clock"), {}, {OTHER}),
                (chosen("clock"), {"parallel_tool_calls": True}, {OTHER}),
            ):
                await both(server, {**BODY, "tool_choice": choice, **fields})
                several = (f"{CALL}\n{OTHER}", f"{OTHER}\n{OTHER}")
                for text in (CALL, OTHER, *several, "Hello", f"Hi {CALL}", ""):
                    assert allows(asked(server), text, tokenizer) == (text in allowed), text


def calling(number: int) -> str:
    return CALL.replace("3}}", f"{number}}}}}")


async def test_how_many_calls_a_grammar_allows() -> None:
    calls = [calling(number) for number in range(MAX_CONSTRAINED_CALLS + 1)]
    for tokenizer in (TOKENIZER, JSON):
        async with held("\n".join(calls), tokenizer) as server:
            for choice in ("required", "auto"):
                form = {"response_format": {"type": "json_object"}}
                body = {**BODY, "tool_choice": choice, **(form if choice == "auto" else {})}
                reply = await both(server, body)
                assert len(reply.calls) == MAX_CONSTRAINED_CALLS
                assert (reply.content, reply.finish) == ("", "tool_calls")
                assert allows(asked(server), "\n".join(calls[:-1]), tokenizer)
                assert not allows(asked(server), "\n".join(calls), tokenizer)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_a_call_is_not_repeated(chunk: int) -> None:
    once, longer = CALL, CALL.replace("3}}", "31}}")
    for tokenizer in (TOKENIZER, JSON):
        for text, made in (
            ("\n".join([once] * 9), 1),
            ("\n".join([once, OTHER, longer, once, calling(4)]), 3),
            ("\n".join([OTHER, OTHER, once]), 1),
            ("\n".join([longer, once, calling(4), OTHER]), 4),
        ):
            async with held(text, tokenizer, chunk) as server:
                reply = await both(server, {**BODY, "tool_choice": "required"})
                assert len(reply.calls) == len({tuple(c.values())[1:] for c in reply.calls}) == made
                assert (reply.content, reply.finish) == ("", "tool_calls")
                if made < 4:
                    assert len(server.engine.stopped) == 2 or chunk == 1000


async def test_a_named_function_is_called_once_and_then_the_reply_ends() -> None:
    text = "\n".join(calling(number) for number in range(20))
    for tokenizer in (TOKENIZER, JSON, PYTHONIC, TOKENIZERS["mistral"], TOKENIZERS["kimi_k3"]):
        # The prompt begins a thought for the one of them that thinks.
        thought = "<|close|>think<|sep|>" if tokenizer is TOKENIZERS["kimi_k3"] else ""
        async with held(thought + text, tokenizer) as server:
            for fields in ({}, {"parallel_tool_calls": True}):
                reply = await both(server, {**BODY, "tool_choice": chosen("get_weather"), **fields})
                assert [call["name"] for call in reply.calls] == ["get_weather"]
                assert (reply.content, reply.finish) == ("", "tool_calls")
            assert len(server.engine.stopped) == 4
            if tokenizer is TOKENIZER:  # it is told of calls by us
                assert "To call one of them, reply with a block" in tokenizer.decode(
                    server.engine.submitted[-1].prompt
                )


async def test_a_model_whose_replies_have_a_head_is_held_to_calls_in_json() -> None:
    tokenizer = byte_tokenizer()
    transitions = {
        "header": [("to=user|", "normal"), ("<atem:function_calls>", "tool")],
        "normal": [("|eom|", "header")],
    }
    tokenizer._response_format = {"initial_state": "header", "transitions": transitions}
    async with held(CALL, tokenizer) as server:
        reply = await both(server, {**BODY, "tool_choice": "required"})
        assert [call["name"] for call in reply.calls] == ["get_weather"]
        assert reply.content == ""


async def test_a_model_without_a_format_may_write_text_or_calls() -> None:
    async with held(f"I < you <tool\n{CALL}", TOKENIZER) as server:
        reply = await both(server, BODY)
        assert reply.content == "I < you <tool"
        assert [call["name"] for call in reply.calls] == ["get_weather"]
        grammar = asked(server)
        for text in ("Hello <tool_cal", "", CALL, f"Hi {CALL}", f"{CALL}\n{OTHER}"):
            assert allows(grammar, text, TOKENIZER), text
        for text in (f"{CALL} and", "<tool_call>x", CALL.replace("3", '"3"')):
            assert not allows(grammar, text, TOKENIZER), text


async def test_a_reply_has_a_form_or_is_a_call() -> None:
    form = {"response_format": {"type": "json_object"}}
    for tokenizer in (TOKENIZER, JSON, PYTHONIC):
        async with held('{"a": 1}', tokenizer) as server:
            reply = await both(server, {**BODY, **form})
            assert (reply.content, reply.calls) == ('{"a": 1}', [])
            for text, allowed in (('{"a": 1}', True), (CALL, True), ("a", False), ("[]", False)):
                assert allows(asked(server), text, tokenizer) == allowed
            body = {**BODY, "guided_choice": ["yes", "no"], "tool_choice": "auto"}
            await both(server, body)
            assert allows(asked(server), "no", tokenizer)
            assert not allows(asked(server), "maybe", tokenizer)
            await both(server, {**body, "tool_choice": "none"})
            assert asked(server).kind == "choice"


async def test_a_strict_function_is_kept_to_its_schema() -> None:
    strict = tool("get_weather", WEATHER["function"]["parameters"], strict=True)
    async with held(f"Hi {CALL}", JSON) as server:
        reply = await both(server, {"messages": MESSAGES, "tools": [strict, CLOCK]})
        assert arguments(reply.calls[0])["days"] == 3
        assert reply.content == "Hi"
        assert allows(asked(server), f"Hi {CALL}\n{OTHER}", JSON)
        assert not allows(asked(server), CALL.replace("3", '"3"'), JSON)
        odd = tool("odd", {"type": "object", "propertyNames": {"pattern": "^a"}}, strict=True)
        status, error = await server.post(PATH, {"messages": MESSAGES, "tools": [odd]})
        assert (status, error["error"]["param"]) == (400, "tools")


async def test_a_call_that_the_length_cuts_off_keeps_what_there_is() -> None:
    cut = {"ended_by_token": False, "finish": "length"}
    async with held(CALL[:-20], TOKENIZER, **cut) as server:
        reply = await both(server, {**BODY, "tool_choice": "required"})
        assert reply.finish == "length"
        assert reply.calls[0]["arguments"] == '{"city": "Zürich}}", "day'
    async with held(CALL[:30], TOKENIZER, **cut) as server:
        reply = await both(server, {**BODY, "tool_choice": "required"})
        assert (reply.content, reply.calls, reply.finish) == ("", [], "length")


async def test_the_form_is_told_in_the_system_message_and_the_history_is_text() -> None:
    system = {"role": "system", "content": "Be brief."}
    async with held("Sunny.", TOKENIZER) as server:
        await both(server, {**BODY, "messages": [system, *MESSAGES, CALLED, RESULT, *MESSAGES]})
        prompt = TOKENIZER.decode(server.engine.submitted[-1].prompt)
        assert prompt.startswith("<|im_start|>system\nBe brief.\n\nThese functions")
        assert json.dumps(CLOCK["function"])[1:-1].split(', "par')[0] in prompt
        assert (
            '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": '
            '{"city": "Zürich"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\nHi<|im_end|>"
        ) in prompt
        await both(server, BODY)
        prompt = TOKENIZER.decode(server.engine.submitted[-1].prompt)
        assert prompt.startswith("<|im_start|>system\nThese functions")
        await both(server, {"messages": [*MESSAGES, CALLED, RESULT]})
        prompt = TOKENIZER.decode(server.engine.submitted[-1].prompt)
        assert prompt.startswith("<|im_start|>user\nHi")
        assert asked_nothing(server)


def asked_nothing(server: Running) -> bool:
    return server.engine.submitted[-1].params.grammar is None


async def test_schemas_of_pydantic_with_definitions() -> None:
    parameters = {
        "$defs": {"Unit": {"enum": ["C", "F"], "type": "string"}},
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}, "n": {"type": ["integer", "null"]}},
        "required": ["unit"],
    }
    call = '<tool_call>\n{"name": "f", "arguments": {"unit": "C", "n": null}}\n</tool_call>'
    async with held(call, TOKENIZER) as server:
        body = {"messages": MESSAGES, "tools": [tool("f", parameters)], "tool_choice": "required"}
        reply = await both(server, body)
        jsonschema.validate(arguments(reply.calls[0]), parameters)
        assert allows(asked(server), call, TOKENIZER)
        assert not allows(asked(server), call.replace('"C"', '"K"'), TOKENIZER)
