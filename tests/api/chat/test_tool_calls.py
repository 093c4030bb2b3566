"""Calls in mlx-lm's formats, streamed and not streamed, written by a scripted engine."""

from __future__ import annotations

import time

import pytest
from support.api.api_server import MESSAGES, running
from support.api.fake_engine import byte_tokenizer, model_info
from support.api.tool_calls import (
    _TURN,
    BODY,
    CALLED,
    CLOCK,
    FAMILIES,
    JSON,
    PATH,
    PYTHONIC,
    RESULT,
    TOKENIZERS,
    WEATHER,
    Family,
    arguments_of,
    engine_writing,
    reply_both_ways,
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
async def test_calls_of_every_family(family: Family) -> None:
    tokenizer = TOKENIZERS[family.parser]
    for text, chunk in ((family.text + "\n", 1), ("", 7)):
        async with running(
            engine_writing(tokenizer, text + family.reply, chunk), tokenizer
        ) as server:
            assert server.service.model().vocabulary.format.calls.parser_name == family.parser
            reply = await reply_both_ways(server, {"messages": MESSAGES, "tools": [WEATHER, CLOCK]})
            assert reply.content == text.strip()
            (call,) = reply.calls
            assert call["name"] == "get_weather"
            assert arguments_of(call) == {"city": "Zürich", "days": 3}
            assert reply.finish == "tool_calls"
            prompt = tokenizer.decode(server.engine.submitted[0].prompt)
            assert '"get_weather"' in prompt
            assert server.engine.submitted[0].params.grammar is None


# Text that is not a call, or several calls

_CALL = "<|tool_call_start|>[{}]<|tool_call_end|>"


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "not a call",
        "[other_function(x=1)]",
        "[get_weather(city=...)]",
        "[get_weather(city=1e999)]",
        "[" * 5000,
        "[get_weather(" + "x" * (1 << 17) + ")]",
    ],
    ids=lambda call: call[:24],
)
async def test_a_malformed_call_is_text(call: str) -> None:
    text = _CALL.format(call)
    engine = engine_writing(PYTHONIC, f"So: {text} ", chunk=100)
    engine.info = model_info(max_context=1 << 19, vocab_size=len(PYTHONIC))
    async with running(engine, PYTHONIC) as server:
        reply = await reply_both_ways(server, BODY)
        assert reply.content == f"So: {text} "
        assert reply.calls == []
        assert reply.finish == "stop"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parser", "start", "part"),
    [
        ("gemma4", "<|tool_call>", "call:a{"),
        ("kimi_k3", "<|open|>tools<|sep|>", "<|open|>call"),
        ("glm47", "<tool_call>", "<arg_key>a</arg_key>"),
    ],
)
async def test_the_time_of_a_parser_is_limited(parser: str, start: str, part: str) -> None:
    tokenizer = TOKENIZERS[parser]
    text = start + part * (60_000 // len(part))
    engine = engine_writing(tokenizer, text, 1000)
    engine.info = model_info(max_context=1 << 19, vocab_size=len(tokenizer))
    async with running(engine, tokenizer) as server:
        started = time.monotonic()
        status, reply = await server.post(PATH, BODY)
        assert time.monotonic() - started < 30
        assert status == 200
        assert reply["choices"][0]["message"]["content"] == text


async def test_a_call_that_the_length_cuts_off_has_its_complete_arguments() -> None:
    text = "So:\n<|tool_call_start|>[get_weather(days=3, city='Zür"
    engine = engine_writing(PYTHONIC, text, ended_by_token=False, finish="length")
    async with running(engine, PYTHONIC) as server:
        reply = await reply_both_ways(server, {**BODY, "logprobs": True})
        assert (reply.content, reply.finish) == ("So:", "length")
        assert [call["arguments"] for call in reply.calls] == ['{"days": 3']
        assert reply.scored == ["S", "o", ":"]


async def test_without_parallel_calls_only_the_first_of_a_list_counts() -> None:
    engine = engine_writing(PYTHONIC, _CALL.format("get_weather(city='a'), clock()") + " And")
    async with running(engine, PYTHONIC) as server:
        reply = await reply_both_ways(server, {**BODY, "parallel_tool_calls": False})
        assert [call["name"] for call in reply.calls] == ["get_weather"]
        assert (reply.content, reply.finish) == ("", "tool_calls")


async def test_an_unconstrained_model_that_repeats_a_call_is_stopped() -> None:
    repeated = _CALL.format("clock()")
    for text in (f"Hm {_CALL.format('get_weather(city=1)')}" + f"\n{repeated}" * 50, repeated * 9):
        engine = engine_writing(PYTHONIC, text)
        async with running(engine, PYTHONIC) as server:
            reply = await reply_both_ways(server, BODY)
            names = [call["name"] for call in reply.calls]
            assert names.count("clock") == len(names) - names.count("get_weather") == 3
            assert reply.finish == "tool_calls"
            assert len(engine.stopped) == 2


async def test_several_calls_with_text_between_them() -> None:
    one, two = _CALL.format("clock()"), _CALL.format("get_weather(city='a'), clock()")
    engine = engine_writing(PYTHONIC, f"First {one}\nthen\n{two}\n")
    async with running(engine, PYTHONIC) as server:
        reply = await reply_both_ways(server, BODY)
        assert [call["name"] for call in reply.calls] == ["clock", "get_weather", "clock"]
        assert len({call["id"] for call in reply.calls}) == 3
        assert reply.content == "Firstthen"
        engine.stopped.clear()
        reply = await reply_both_ways(server, {**BODY, "parallel_tool_calls": False})
        assert [call["name"] for call in reply.calls] == ["clock"]
        assert (reply.content, reply.finish) == ("First", "tool_calls")
        assert len(engine.stopped) == 2


async def test_without_tools_tags_are_ordinary_tokens() -> None:
    async with running(
        engine_writing(PYTHONIC, "a " + _CALL.format("clock()")), PYTHONIC
    ) as server:
        for body in ({"messages": MESSAGES}, {**BODY, "tool_choice": "none"}):
            reply = await reply_both_ways(server, body)
            assert (reply.content, reply.calls, reply.finish) == ("a [clock()]", [], "stop")
            assert "get_weather" not in PYTHONIC.decode(server.engine.submitted[-1].prompt)
        reply = await reply_both_ways(server, {"messages": MESSAGES, "skip_special_tokens": False})
        assert reply.content == "a " + _CALL.format("clock()")


async def test_log_probabilities_and_stop_strings_apply_to_the_text_only() -> None:
    text = "Aé " + _CALL.format("clock()") + " B, C"
    async with running(engine_writing(PYTHONIC, text), PYTHONIC) as server:
        reply = await reply_both_ways(
            server, {**BODY, "logprobs": True, "n": 1, "stop": [",", "clock"]}
        )
        assert reply.content == "Aé B"
        assert reply.scored == ["A", "bytes:\\xc3", "bytes:\\xa9", " ", "B"]
        assert [call["name"] for call in reply.calls] == ["clock"]
        status, many = await server.post(PATH, {**BODY, "n": 3})
        assert status == 200
        assert [len(choice["message"]["tool_calls"]) for choice in many["choices"]] == [1, 1, 1]
    async with running(
        engine_writing(PYTHONIC, "A " + _CALL.format("clock()") + " \n"), PYTHONIC
    ) as server:
        reply = await reply_both_ways(server, {**BODY, "logprobs": True})
        assert (reply.content, reply.scored) == ("A", ["A"])


# History


async def test_calls_in_the_history_are_objects_for_templates() -> None:
    async with running(engine_writing(JSON, "Sunny."), JSON) as server:
        reply = await reply_both_ways(server, {**BODY, "messages": [*MESSAGES, CALLED, RESULT]})
        assert reply.content == "Sunny."
        prompt = JSON.decode(server.engine.submitted[0].prompt)
        call = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
        assert f"<tool_call>\n{call}\n</tool_call>" in prompt
        assert "<|im_start|>tool\nsunny" in prompt


async def test_calls_in_the_history_are_text_for_templates_that_expect_it() -> None:
    tokenizer = byte_tokenizer(
        _TURN.replace("@CALL@", "<tool_call>\n<function={{ '' + tool_call.arguments }}"),
        plain=["<tool_call>", "</tool_call>"],
    )
    async with running(engine_writing(tokenizer, "Sunny."), tokenizer) as server:
        await reply_both_ways(server, {**BODY, "messages": [*MESSAGES, CALLED, RESULT]})
        prompt = tokenizer.decode(server.engine.submitted[0].prompt)
        assert '<function={"city": "Zürich"}' in prompt
