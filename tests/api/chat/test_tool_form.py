"""JSON calls constrained by a grammar, for models with and without a native format."""

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
    arguments_of,
    engine_writing,
    reply_both_ways,
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
    """Whether the grammar accepts ``text`` as a complete reply."""
    matcher = compiled(grammar, vocabulary(tokenizer))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@asynccontextmanager
async def serving_reply(
    text: str, tokenizer: TokenizerWrapper, chunk: int = 1, **ending: Any
) -> AsyncIterator[Running]:
    """A server whose model writes ``text``; it compiles grammars in this process."""

    async def check(grammar: Grammar) -> None:
        compiled(grammar, vocabulary(tokenizer))

    async with running(engine_writing(tokenizer, text, chunk, **ending), tokenizer) as server:
        server.service.model().vocabulary.grammars.check = check  # type: ignore[method-assign]
        yield server


def last_grammar(server: Running) -> Grammar:
    """The grammar of the last request that reached the engine."""
    grammar = server.engine.submitted[-1].params.grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("chunk", [1, 9])
@pytest.mark.parametrize("tokenizer", [TOKENIZER, JSON], ids=["none", "json_tools"])
async def test_calls_are_streamed_as_they_are_written(
    tokenizer: TokenizerWrapper, chunk: int
) -> None:
    async with serving_reply(f"{CALL}\n{OTHER}", tokenizer, chunk) as server:
        body = {**BODY, "tool_choice": "required"}
        reply = await reply_both_ways(server, body)
        assert (reply.content, reply.finish) == ("", "tool_calls")
        assert [call["name"] for call in reply.calls] == ["get_weather", "clock"]
        assert arguments_of(reply.calls[0]) == {"city": "Zürich}}", "days": 3}
        assert reply.calls[1]["arguments"] == "{}"
        assert allows(last_grammar(server), f"{CALL}\n{OTHER}", tokenizer)
        chunks = await server.chunks(PATH, body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        parts = [
            call["function"]["arguments"]
            for delta in deltas
            for call in delta.get("tool_calls", ())
            if call["index"] == 0
        ]
        assert len(parts) > (20 if chunk == 1 else 3)


async def test_each_tool_choice_allows_its_calls() -> None:
    for tokenizer in (TOKENIZER, JSON, PYTHONIC, TOKENIZERS["glm47"]):
        async with serving_reply(CALL, tokenizer) as server:
            single = {"parallel_tool_calls": False}
            for choice, fields, allowed in (
                ("required", {}, {CALL, OTHER, f"{CALL}\n{OTHER}", f"{OTHER}\n{OTHER}"}),
                ("required", single, {CALL, OTHER}),
                (chosen("clock"), {}, {OTHER}),
                (chosen("clock"), {"parallel_tool_calls": True}, {OTHER}),
            ):
                await reply_both_ways(server, {**BODY, "tool_choice": choice, **fields})
                several = (f"{CALL}\n{OTHER}", f"{OTHER}\n{OTHER}")
                for text in (CALL, OTHER, *several, "Hello", f"Hi {CALL}", ""):
                    assert allows(last_grammar(server), text, tokenizer) == (text in allowed), text


def call_with_days(number: int) -> str:
    return CALL.replace("3}}", f"{number}}}}}")


async def test_a_grammar_limits_the_number_of_calls() -> None:
    calls = [call_with_days(number) for number in range(MAX_CONSTRAINED_CALLS + 1)]
    for tokenizer in (TOKENIZER, JSON):
        async with serving_reply("\n".join(calls), tokenizer) as server:
            for choice in ("required", "auto"):
                form = {"response_format": {"type": "json_object"}}
                body = {**BODY, "tool_choice": choice, **(form if choice == "auto" else {})}
                reply = await reply_both_ways(server, body)
                assert len(reply.calls) == MAX_CONSTRAINED_CALLS
                assert (reply.content, reply.finish) == ("", "tool_calls")
                assert allows(last_grammar(server), "\n".join(calls[:-1]), tokenizer)
                assert not allows(last_grammar(server), "\n".join(calls), tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_a_call_is_not_repeated(chunk: int) -> None:
    call, longer = CALL, CALL.replace("3}}", "31}}")
    for tokenizer in (TOKENIZER, JSON):
        for text, made in (
            ("\n".join([call] * 9), 1),
            ("\n".join([call, OTHER, longer, call, call_with_days(4)]), 3),
            ("\n".join([OTHER, OTHER, call]), 1),
            ("\n".join([longer, call, call_with_days(4), OTHER]), 4),
        ):
            async with serving_reply(text, tokenizer, chunk) as server:
                reply = await reply_both_ways(server, {**BODY, "tool_choice": "required"})
                assert len(reply.calls) == len({tuple(c.values())[1:] for c in reply.calls}) == made
                assert (reply.content, reply.finish) == ("", "tool_calls")
                if made < 4:
                    assert len(server.engine.stopped) == 2 or chunk == 1000


async def test_a_named_function_is_called_once_and_ends_the_reply() -> None:
    text = "\n".join(call_with_days(number) for number in range(20))
    for tokenizer in (TOKENIZER, JSON, PYTHONIC, TOKENIZERS["mistral"], TOKENIZERS["kimi_k3"]):
        # kimi_k3's prompt opens a thought, which the reply has to close.
        thought = "<|close|>think<|sep|>" if tokenizer is TOKENIZERS["kimi_k3"] else ""
        async with serving_reply(thought + text, tokenizer) as server:
            for fields in ({}, {"parallel_tool_calls": True}):
                reply = await reply_both_ways(
                    server, {**BODY, "tool_choice": chosen("get_weather"), **fields}
                )
                assert [call["name"] for call in reply.calls] == ["get_weather"]
                assert (reply.content, reply.finish) == ("", "tool_calls")
            assert len(server.engine.stopped) == 4
            if tokenizer is TOKENIZER:  # its template does not describe calls, so the server does
                assert "To call one of them, reply with a block" in tokenizer.decode(
                    server.engine.submitted[-1].prompt
                )


async def test_a_model_whose_replies_have_a_header_calls_in_json() -> None:
    tokenizer = byte_tokenizer()
    transitions = {
        "header": [("to=user|", "normal"), ("<atem:function_calls>", "tool")],
        "normal": [("|eom|", "header")],
    }
    tokenizer._response_format = {"initial_state": "header", "transitions": transitions}
    async with serving_reply(CALL, tokenizer) as server:
        reply = await reply_both_ways(server, {**BODY, "tool_choice": "required"})
        assert [call["name"] for call in reply.calls] == ["get_weather"]
        assert reply.content == ""


async def test_a_model_without_a_format_may_write_text_or_calls() -> None:
    async with serving_reply(f"I < you <tool\n{CALL}", TOKENIZER) as server:
        reply = await reply_both_ways(server, BODY)
        assert reply.content == "I < you <tool"
        assert [call["name"] for call in reply.calls] == ["get_weather"]
        grammar = last_grammar(server)
        for text in ("Hello <tool_cal", "", CALL, f"Hi {CALL}", f"{CALL}\n{OTHER}"):
            assert allows(grammar, text, TOKENIZER), text
        for text in (f"{CALL} and", "<tool_call>x", CALL.replace("3", '"3"')):
            assert not allows(grammar, text, TOKENIZER), text


async def test_a_reply_follows_the_format_or_is_a_call() -> None:
    form = {"response_format": {"type": "json_object"}}
    for tokenizer in (TOKENIZER, JSON, PYTHONIC):
        async with serving_reply('{"a": 1}', tokenizer) as server:
            reply = await reply_both_ways(server, {**BODY, **form})
            assert (reply.content, reply.calls) == ('{"a": 1}', [])
            for text, allowed in (('{"a": 1}', True), (CALL, True), ("a", False), ("[]", False)):
                assert allows(last_grammar(server), text, tokenizer) == allowed
            body = {**BODY, "guided_choice": ["yes", "no"], "tool_choice": "auto"}
            await reply_both_ways(server, body)
            assert allows(last_grammar(server), "no", tokenizer)
            assert not allows(last_grammar(server), "maybe", tokenizer)
            await reply_both_ways(server, {**body, "tool_choice": "none"})
            assert last_grammar(server).kind == "choice"


async def test_a_reply_is_a_call_or_one_of_many_choices() -> None:
    choices = [f"choice {number}" for number in range(1000)]
    async with serving_reply("choice 7", TOKENIZER) as server:
        reply = await reply_both_ways(server, {**BODY, "guided_choice": choices})
        assert reply.content == "choice 7"
        for text, allowed in (("choice 999", True), (CALL, True), ("choice", False)):
            assert allows(last_grammar(server), text, TOKENIZER) == allowed


async def test_a_strict_functions_arguments_follow_its_schema() -> None:
    strict = tool("get_weather", WEATHER["function"]["parameters"], strict=True)
    async with serving_reply(f"Hi {CALL}", JSON) as server:
        reply = await reply_both_ways(server, {"messages": MESSAGES, "tools": [strict, CLOCK]})
        assert arguments_of(reply.calls[0])["days"] == 3
        assert reply.content == "Hi"
        assert allows(last_grammar(server), f"Hi {CALL}\n{OTHER}", JSON)
        assert not allows(last_grammar(server), CALL.replace("3", '"3"'), JSON)
        odd = tool("odd", {"type": "object", "propertyNames": {"pattern": "^a"}}, strict=True)
        status, error = await server.post(PATH, {"messages": MESSAGES, "tools": [odd]})
        assert (status, error["error"]["param"]) == (400, "tools")


async def test_a_call_cut_off_by_the_length_keeps_its_beginning() -> None:
    cut = {"ended_by_token": False, "finish": "length"}
    async with serving_reply(CALL[:-20], TOKENIZER, **cut) as server:
        reply = await reply_both_ways(server, {**BODY, "tool_choice": "required"})
        assert reply.finish == "length"
        assert reply.calls[0]["arguments"] == '{"city": "Zürich}}", "day'
    async with serving_reply(CALL[:30], TOKENIZER, **cut) as server:
        reply = await reply_both_ways(server, {**BODY, "tool_choice": "required"})
        assert (reply.content, reply.calls, reply.finish) == ("", [], "length")


async def test_the_system_message_describes_calls_and_the_history_is_text() -> None:
    system = {"role": "system", "content": "Be brief."}
    async with serving_reply("Sunny.", TOKENIZER) as server:
        await reply_both_ways(
            server, {**BODY, "messages": [system, *MESSAGES, CALLED, RESULT, *MESSAGES]}
        )
        prompt = TOKENIZER.decode(server.engine.submitted[-1].prompt)
        assert prompt.startswith("<|im_start|>system\nBe brief.\n\nThese functions")
        assert json.dumps(CLOCK["function"])[1:-1].split(', "par')[0] in prompt
        assert (
            '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": '
            '{"city": "Zürich"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\nHi<|im_end|>"
        ) in prompt
        await reply_both_ways(server, BODY)
        prompt = TOKENIZER.decode(server.engine.submitted[-1].prompt)
        assert prompt.startswith("<|im_start|>system\nThese functions")
        await reply_both_ways(server, {"messages": [*MESSAGES, CALLED, RESULT]})
        prompt = TOKENIZER.decode(server.engine.submitted[-1].prompt)
        assert prompt.startswith("<|im_start|>user\nHi")
        assert server.engine.submitted[-1].params.grammar is None


async def test_schemas_of_pydantic_with_definitions() -> None:
    parameters = {
        "$defs": {"Unit": {"enum": ["C", "F"], "type": "string"}},
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}, "n": {"type": ["integer", "null"]}},
        "required": ["unit"],
    }
    call = '<tool_call>\n{"name": "f", "arguments": {"unit": "C", "n": null}}\n</tool_call>'
    async with serving_reply(call, TOKENIZER) as server:
        body = {"messages": MESSAGES, "tools": [tool("f", parameters)], "tool_choice": "required"}
        reply = await reply_both_ways(server, body)
        jsonschema.validate(arguments_of(reply.calls[0]), parameters)
        assert allows(last_grammar(server), call, TOKENIZER)
        assert not allows(last_grammar(server), call.replace('"C"', '"K"'), TOKENIZER)
