"""Families of tool-call formats, and scripted engines that write calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.api.api_server import MESSAGES, Running, tool
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info

from chairlift.engine.messages import Submit

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
    """A tool-call format of mlx-lm.

    Attributes:
        parser: the name of mlx-lm's parser.
        marker: the part of a chat template by which mlx-lm recognizes the format.
        reply: a call of WEATHER with Zürich and 3.
        special, plain: the special and the other tokens that the format adds to the vocabulary.
        text: a text that stands before the call.
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
        "muse_spark",
        "<atem:function_calls>{{ tool_call.name }}",
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Zürich</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    ),
    Family(
        # Its tags are not tokens; they are found by their text.
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


def engine_writing(
    tokenizer: TokenizerWrapper, text: str, chunk: int = 1, **ending: Any
) -> FakeEngine:
    """An engine whose every reply is ``text``, ``chunk`` tokens a step.

    The end token ends a reply; ``ending`` overrides this with fields of Scripted.
    """
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    ended = {"ended_by_token": True, **ending}
    if ended["ended_by_token"]:
        tokens.append(tokenizer.eos_token_id)
    return FakeEngine(
        model_info(vocab_size=len(tokenizer)), lambda *_: Scripted(tokens, chunk=chunk, **ended)
    )


def truncating_engine(tokenizer: TokenizerWrapper, text: str) -> FakeEngine:
    """An engine whose every reply is ``text``, cut off after max_tokens."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    def script(request: Submit, index: int) -> Scripted:
        limit = request.params.max_tokens
        if limit < len(tokens):
            return Scripted(tokens[:limit], "length")
        return Scripted(tokens, ended_by_token=True)

    return FakeEngine(model_info(vocab_size=len(tokenizer)), script)


def skip_grammar_check(server: Running) -> None:
    """Lets the server accept any grammar without compiling it, which other tests cover."""

    async def check(grammar: object) -> None:
        pass

    server.service.model().vocabulary.grammars.check = check  # type: ignore[method-assign]


@dataclass
class ParsedChoice:
    """A choice, put together from its chunks as a client does it.

    Attributes:
        calls: each call's id, name and arguments.
        finish: the finish reason.
        scored: the tokens that have log-probabilities.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    finish: str | None = None
    scored: list[str] = field(default_factory=list)


async def streamed_choice(server: Running, body: dict[str, Any]) -> ParsedChoice:
    """Streams a chat request with one choice."""
    merged = ParsedChoice()
    for chunk in await server.chunks(PATH, body):
        (choice,) = chunk["choices"]
        assert merged.finish is None
        delta = choice["delta"]
        merged.content += delta.get("content", "")
        merged.reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(merged.calls)
                assert call["type"] == "function"
                name = call["function"]["name"]
                merged.calls.append({"id": call["id"], "name": name, "arguments": ""})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
            merged.calls[call["index"]]["arguments"] += call["function"]["arguments"]
        if choice["logprobs"] is not None:
            merged.scored += [entry["token"] for entry in choice["logprobs"]["content"]]
        merged.finish = choice["finish_reason"]
    return merged


async def reply_both_ways(server: Running, body: dict[str, Any]) -> ParsedChoice:
    """Sends a chat request with and without ``stream``, and checks that the replies agree.

    Only the ids of the calls may differ.
    """
    status, reply = await server.post(PATH, body)
    assert status == 200, reply
    (choice,) = reply["choices"]
    message = choice["message"]
    calls = [{"id": c["id"], **c["function"]} for c in message.get("tool_calls", ())]
    scored = [entry["token"] for entry in (choice["logprobs"] or {}).get("content", ())]
    unstreamed = ParsedChoice(
        message["content"] or "",
        message.get("reasoning_content", ""),
        calls,
        choice["finish_reason"],
        scored,
    )
    assert (message["content"] is None) == (bool(calls) and not unstreamed.content)
    streamed = await streamed_choice(server, body)
    for one, other in zip(unstreamed.calls, streamed.calls, strict=True):
        other["id"] = one["id"]
    assert streamed == unstreamed
    return unstreamed


def arguments_of(call: dict[str, str]) -> Any:
    return json.loads(call["arguments"])


JSON = TOKENIZERS["json_tools"]
PYTHONIC = TOKENIZERS["pythonic"]
BODY = {"messages": MESSAGES, "tools": [WEATHER, CLOCK]}

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
