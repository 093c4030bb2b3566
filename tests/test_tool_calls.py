"""Calls in the formats that mlx-lm knows, whole and streamed; a scripted engine writes them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from api_server import MESSAGES, Running, running, tool
from fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info
from mlx_lm.tokenizer_utils import TokenizerWrapper

PATH = "/v1/chat/completions"
WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CLOCK = tool("clock")
_TURN = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for tool_call in m.tool_calls or [] %}{% set tool_call = tool_call.function %}"
    "@CALL@{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HERMES_CALL = (
    '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "\n</tool_call>"
)


@dataclass(frozen=True)
class Family:
    """A format: its parser, what in a template or vocabulary tells it, and a reply in it.

    ``reply`` calls WEATHER with Zürich and 3, after ``text``.
    """

    parser: str
    marker: str
    reply: str
    special: Sequence[str] = ()
    plain: Sequence[str] = ()
    text: str = "Let me see."

    def tokenizer(self) -> TokenizerWrapper:
        template = _TURN.replace("@CALL@", self.marker)
        return byte_tokenizer(template, self.special, self.plain)


FAMILIES = [
    Family(
        "json_tools",
        _HERMES_CALL,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}'
        "\n</tool_call>",
        plain=["<tool_call>", "</tool_call>"],
    ),
    Family(
        "qwen3_coder",
        "<tool_call>\n<function={{ tool_call.name }}>"
        "{% for name, value in tool_call.arguments | items %}\n<parameter={{ name }}>\n{{ value }}"
        "\n</parameter>{% endfor %}\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        plain=["<tool_call>", "</tool_call>"],
    ),
    Family(
        "pythonic",
        "<|tool_call_start|>[{{ tool_call.name }}()]<|tool_call_end|>",
        "<|tool_call_start|>[get_weather(city='Zürich', days=3)]<|tool_call_end|>",
        special=["<|tool_call_start|>", "<|tool_call_end|>"],
    ),
    Family(
        "mistral",
        "[TOOL_CALLS]{{ tool_call.name }}[ARGS]{{ tool_call.arguments | tojson }}",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 3}',
        special=["[TOOL_CALLS]", "[ARGS]"],
    ),
    Family(
        "glm47",
        "<tool_call>{{ tool_call.name }}<arg_key></arg_key></tool_call>",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        plain=["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"],
    ),
    Family(
        "minimax_m2",
        "<minimax:tool_call>{{ tool_call.name }}",
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Zürich</parameter>\n<parameter name="days">3</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        special=["<minimax:tool_call>", "</minimax:tool_call>"],
    ),
    Family(
        "gemma4",
        "<|tool_call>{{ tool_call.name }}<tool_call|>",
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>',
        special=["<|tool_call>", "<tool_call|>", '<|"|>'],
    ),
    Family(
        "function_gemma",
        "<start_function_call>{{ tool_call.name }}",
        "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3}"
        "<end_function_call>",
        special=["<start_function_call>", "<end_function_call>", "<escape>"],
    ),
    Family(
        "kimi_k2",
        "<|tool_calls_section_begin|>{{ tool_call.name }}",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Zürich", "days": 3}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        special=[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ],
    ),
    Family(
        "longcat",
        "<longcat_tool_call>{{ tool_call.name }}",
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Zürich</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
        "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
        plain=["<longcat_tool_call>", "</longcat_tool_call>"],
    ),
    Family(
        # Its tags are no tokens, and are found by their text.
        "minicpm5",
        '<function name="{{ tool_call.name }}"><param name="x"></param></function>',
        '<function name="get_weather"><param name="city">Zürich</param>'
        '<param name="days">3</param></function>',
    ),
    Family(
        # Each tag is three tokens.
        "kimi_k3",
        "{{ tool_call.name }}",
        "<|open|>tools<|sep|>\n"
        '<|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Zürich<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|>\n<|close|>tools<|sep|>",
        special=["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    ),
]
TOKENIZERS = {family.parser: family.tokenizer() for family in FAMILIES}


def writing(tokenizer: TokenizerWrapper, text: str, chunk: int = 1, **ending: Any) -> FakeEngine:
    """An engine whose every reply is ``text``."""
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    ended = {"ended_by_token": True, **ending}
    if ended["ended_by_token"]:
        tokens.append(tokenizer.eos_token_id)
    return FakeEngine(
        model_info(vocab_size=len(tokenizer)), lambda *_: Scripted(tokens, chunk=chunk, **ended)
    )


@dataclass
class Told:
    """A streamed choice, put together as a client does it."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    finish: str | None = None
    scored: list[str] = field(default_factory=list)


async def told(server: Running, body: dict[str, Any]) -> Told:
    """What the stream of a request with one choice says."""
    whole = Told()
    for chunk in await server.chunks(PATH, body):
        (choice,) = chunk["choices"]
        assert whole.finish is None
        delta = choice["delta"]
        whole.content += delta.get("content", "")
        whole.reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(whole.calls)
                assert call["type"] == "function"
                name = call["function"]["name"]
                whole.calls.append({"id": call["id"], "name": name, "arguments": ""})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
            whole.calls[call["index"]]["arguments"] += call["function"]["arguments"]
        if choice["logprobs"] is not None:
            whole.scored += [entry["token"] for entry in choice["logprobs"]["content"]]
        whole.finish = choice["finish_reason"]
    return whole


async def both(server: Running, body: dict[str, Any]) -> Told:
    """What a request gets, which is the same whole and streamed but for the calls' ids."""
    status, reply = await server.post(PATH, body)
    assert status == 200, reply
    (choice,) = reply["choices"]
    message = choice["message"]
    calls = [{"id": c["id"], **c["function"]} for c in message.get("tool_calls", ())]
    scored = [entry["token"] for entry in (choice["logprobs"] or {}).get("content", ())]
    whole = Told(
        message["content"] or "",
        message.get("reasoning_content", ""),
        calls,
        choice["finish_reason"],
        scored,
    )
    assert (message["content"] is None) == (bool(calls) and not whole.content)
    streamed = await told(server, body)
    for mine, other in zip(whole.calls, streamed.calls, strict=True):
        other["id"] = mine["id"]
    assert streamed == whole
    return whole


def arguments(call: dict[str, str]) -> Any:
    return json.loads(call["arguments"])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
async def test_calls_of_every_family(family: Family) -> None:
    tokenizer = TOKENIZERS[family.parser]
    for before, chunk in ((family.text + "\n", 1), ("", 7)):
        async with running(writing(tokenizer, before + family.reply, chunk), tokenizer) as server:
            assert server.service.model().vocabulary.format.calls.parser_name == family.parser
            reply = await both(server, {"messages": MESSAGES, "tools": [WEATHER, CLOCK]})
            assert reply.content == before.strip()
            (call,) = reply.calls
            assert call["name"] == "get_weather"
            assert arguments(call) == {"city": "Zürich", "days": 3}
            assert reply.finish == "tool_calls"
            prompt = tokenizer.decode(server.engine.submitted[0].prompt)
            assert '"get_weather"' in prompt
            assert server.engine.submitted[0].params.grammar is None


# What is no call, or more than one

JSON = TOKENIZERS["json_tools"]
PYTHONIC = TOKENIZERS["pythonic"]
BODY = {"messages": MESSAGES, "tools": [WEATHER, CLOCK]}
_CALL = "<|tool_call_start|>[{}]<|tool_call_end|>"


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
    engine = writing(PYTHONIC, f"So: {text} ", chunk=100)
    engine.info = model_info(max_context=1 << 19, vocab_size=len(PYTHONIC))
    async with running(engine, PYTHONIC) as server:
        reply = await both(server, BODY)
        assert reply.content == f"So: {text} "
        assert reply.calls == []
        assert reply.finish == "stop"


@pytest.mark.parametrize(
    ("parser", "start", "part"),
    [
        ("gemma4", "<|tool_call>", "call:a{"),
        ("kimi_k3", "<|open|>tools<|sep|>", "<|open|>call"),
        ("glm47", "<tool_call>", "<arg_key>a</arg_key>"),
    ],
)
async def test_parsers_are_not_given_for_ever(parser: str, start: str, part: str) -> None:
    tokenizer = TOKENIZERS[parser]
    text = start + part * (60_000 // len(part))
    engine = writing(tokenizer, text, 1000)
    engine.info = model_info(max_context=1 << 19, vocab_size=len(tokenizer))
    async with running(engine, tokenizer) as server:
        started = time.monotonic()
        status, reply = await server.post(PATH, BODY)
        assert time.monotonic() - started < 5
        assert status == 200
        assert reply["choices"][0]["message"]["content"] == text


async def test_a_call_that_the_length_cuts_off_is_left_out() -> None:
    text = "So:\n<|tool_call_start|>[get_weather(city='Zür"
    engine = writing(PYTHONIC, text, ended_by_token=False, finish="length")
    async with running(engine, PYTHONIC) as server:
        reply = await both(server, {**BODY, "logprobs": True})
        assert (reply.content, reply.calls, reply.finish) == ("So:", [], "length")
        assert reply.scored == ["S", "o", ":"]


async def test_one_call_at_most_also_of_a_list() -> None:
    engine = writing(PYTHONIC, _CALL.format("get_weather(city='a'), clock()") + " And")
    async with running(engine, PYTHONIC) as server:
        reply = await both(server, {**BODY, "parallel_tool_calls": False})
        assert [call["name"] for call in reply.calls] == ["get_weather"]
        assert (reply.content, reply.finish) == ("", "tool_calls")


async def test_a_free_model_that_repeats_a_call_without_end_is_stopped() -> None:
    again = _CALL.format("clock()")
    for text in (f"Hm {_CALL.format('get_weather(city=1)')}" + f"\n{again}" * 50, again * 9):
        engine = writing(PYTHONIC, text)
        async with running(engine, PYTHONIC) as server:
            reply = await both(server, BODY)
            names = [call["name"] for call in reply.calls]
            assert names.count("clock") == len(names) - names.count("get_weather") == 3
            assert reply.finish == "tool_calls"
            assert len(engine.stopped) == 2


async def test_several_calls_text_between_them_and_only_the_first_if_not_parallel() -> None:
    one, two = _CALL.format("clock()"), _CALL.format("get_weather(city='a'), clock()")
    engine = writing(PYTHONIC, f"First {one}\nthen\n{two}\n")
    async with running(engine, PYTHONIC) as server:
        reply = await both(server, BODY)
        assert [call["name"] for call in reply.calls] == ["clock", "get_weather", "clock"]
        assert len({call["id"] for call in reply.calls}) == 3
        assert reply.content == "Firstthen"
        engine.stopped.clear()
        reply = await both(server, {**BODY, "parallel_tool_calls": False})
        assert [call["name"] for call in reply.calls] == ["clock"]
        assert (reply.content, reply.finish) == ("First", "tool_calls")
        assert len(engine.stopped) == 2


async def test_without_tools_tags_are_what_they_always_were() -> None:
    async with running(writing(PYTHONIC, "a " + _CALL.format("clock()")), PYTHONIC) as server:
        for body in ({"messages": MESSAGES}, {**BODY, "tool_choice": "none"}):
            reply = await both(server, body)
            assert (reply.content, reply.calls, reply.finish) == ("a [clock()]", [], "stop")
            assert "get_weather" not in PYTHONIC.decode(server.engine.submitted[-1].prompt)
        reply = await both(server, {"messages": MESSAGES, "skip_special_tokens": False})
        assert reply.content == "a " + _CALL.format("clock()")


async def test_log_probabilities_and_stop_strings_are_those_of_the_text() -> None:
    text = "Aé " + _CALL.format("clock()") + " B, C"
    async with running(writing(PYTHONIC, text), PYTHONIC) as server:
        reply = await both(server, {**BODY, "logprobs": True, "n": 1, "stop": [",", "clock"]})
        assert reply.content == "Aé B"
        assert reply.scored == ["A", "bytes:\\xc3", "bytes:\\xa9", " ", "B"]
        assert [call["name"] for call in reply.calls] == ["clock"]
        status, many = await server.post(PATH, {**BODY, "n": 3})
        assert status == 200
        assert [len(choice["message"]["tool_calls"]) for choice in many["choices"]] == [1, 1, 1]
    async with running(
        writing(PYTHONIC, "A " + _CALL.format("clock()") + " \n"), PYTHONIC
    ) as server:
        reply = await both(server, {**BODY, "logprobs": True})
        assert (reply.content, reply.scored) == ("A", ["A"])


# History

CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


async def test_calls_in_the_history_are_objects_for_templates() -> None:
    async with running(writing(JSON, "Sunny."), JSON) as server:
        reply = await both(server, {**BODY, "messages": [*MESSAGES, CALLED, RESULT]})
        assert reply.content == "Sunny."
        prompt = JSON.decode(server.engine.submitted[0].prompt)
        call = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
        assert f"<tool_call>\n{call}\n</tool_call>" in prompt
        assert "<|im_start|>tool\nsunny" in prompt


async def test_calls_in_the_history_are_text_for_templates_that_want_it() -> None:
    tokenizer = byte_tokenizer(
        _TURN.replace("@CALL@", "<tool_call>\n<function={{ '' + tool_call.arguments }}"),
        plain=["<tool_call>", "</tool_call>"],
    )
    async with running(writing(tokenizer, "Sunny."), tokenizer) as server:
        await both(server, {**BODY, "messages": [*MESSAGES, CALLED, RESULT]})
        prompt = tokenizer.decode(server.engine.submitted[0].prompt)
        assert '<function={"city": "Zürich"}' in prompt
