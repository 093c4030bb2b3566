"""gpt-oss's format: a tokenizer with its special tokens, and the examples of its documentation.

The examples are those of OpenAI's article "OpenAI Harmony Response Format".
"""

from __future__ import annotations

from typing import Any, NamedTuple

from support.api.fake_engine import byte_tokenizer

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
SPECIAL = [START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL]

# It writes conversations as gpt-oss's does: one call in a message, and reasoning before a call.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
    "{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}"
    "{% set call = m.tool_calls[0].function %}{% set last.name = call.name %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TEMPLATE = "{% set last = namespace(name='') %}" + TEMPLATE
TOKENIZER = byte_tokenizer(TEMPLATE, special=SPECIAL)


def token(text: str) -> int:
    return int(TOKENIZER.convert_tokens_to_ids(text))


class Example(NamedTuple):
    """A reply of the documentation, and its pieces.

    ``text`` lacks the last token, ``ended_by``. ``calls`` are name and arguments of each call.
    """

    text: str
    ended_by: str
    reasoning: str
    content: str
    calls: list[list[str]]


EXAMPLES: dict[str, Example] = {
    "chat": Example(
        '<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple arithmetic. Provide '
        "answer.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.",
        RETURN,
        'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.',
        "2 + 2 = 4.",
        [],
    ),
    "call": Example(
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"location":"San Francisco"}',
        CALL,
        "Need to use function get_weather.",
        "",
        [["get_weather", '{"location":"San Francisco"}']],
    ),
    "preamble": Example(
        "<|channel|>analysis<|message|>{long chain of thought}<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>**Action plan**:\n1. Generate an HTML file\n2. Generate a "
        "JavaScript for the Node.js server\n3. Start the server\n---\nWill start executing the "
        "plan step by step<|end|><|start|>assistant<|channel|>commentary to=functions.generate_file"
        '<|constrain|>json<|message|>{"template": "basic_html", "path": "index.html"}',
        CALL,
        "{long chain of thought}",
        "**Action plan**:\n1. Generate an HTML file\n2. Generate a JavaScript for the Node.js "
        "server\n3. Start the server\n---\nWill start executing the plan step by step",
        [["generate_file", '{"template": "basic_html", "path": "index.html"}']],
    ),
    # The recipient may be in the role part of the header, where the template writes it.
    "recipient in the role": Example(
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"location":"San Francisco"}',
        CALL,
        "Need to use function get_weather.",
        "",
        [["get_weather", '{"location":"San Francisco"}']],
    ),
    "call without reasoning": Example(
        " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"location":"Tōkyō", "s": "<|x|> }"}',
        CALL,
        "",
        "",
        [["get_weather", '{"location":"Tōkyō", "s": "<|x|> }"}']],
    ),
}

# What models write besides the documented form. Nothing of it is lost.
UNUSUAL: dict[str, Example] = {
    "no header": Example("Hello é", RETURN, "", "Hello é", []),
    "a long text without a header": Example(
        "a b c d " * 30 + "x", RETURN, "", "a b c d " * 30 + "x", []
    ),
    "an unknown channel": Example("<|channel|>aside<|message|>Hm", RETURN, "", "Hm", []),
    "no channel": Example("<|message|>Hm", RETURN, "", "Hm", []),
    "two thoughts and two texts": Example(
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        "<|end|><|start|>assistant<|channel|>commentary<|message|>c<|end|><|start|>assistant"
        "<|channel|>final<|message|>d",
        RETURN,
        "a\n\nb",
        "c\n\nd",
        [],
    ),
    "no end of a message": Example(
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", RETURN, "a", "b", []
    ),
    "a built-in tool of the analysis": Example(
        "<|channel|>analysis to=python code<|message|>1 + 1", CALL, "1 + 1", "", []
    ),
    "an unknown function": Example(
        "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}",
        CALL,
        "",
        " to=functions.other <|constrain|>json<|message|>{}".join(["<|channel|>commentary", ""]),
        [],
    ),
    "a message of another author": Example(
        "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b",
        RETURN,
        "",
        "a\n\n<|start|>user<|message|>b",
        [],
    ),
    "a header without a message": Example("<|channel|>final", RETURN, "", "<|channel|>final", []),
    "a tag in a text": Example(
        "<|channel|>final<|message|>a<|message|>b<|constrain|>c",
        RETURN,
        "",
        "a<|message|>b<|constrain|>c",
        [],
    ),
    "several calls": Example(
        '<|channel|>commentary to=functions.get_weather json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant<|channel|>commentary to=generate_file<|message|>",
        CALL,
        "",
        "",
        [["get_weather", '{"a": 1}'], ["generate_file", "{}"]],
    ),
    "arguments that are no JSON": Example(
        "<|channel|>commentary to=functions.get_weather<|message|>{'a'",
        CALL,
        "",
        "",
        [["get_weather", "{'a'"]],
    ),
}


def body(**fields: Any) -> dict[str, Any]:
    """A chat request with the functions of the examples."""
    from support.api.api_server import MESSAGES, tool

    tools = [tool("get_weather"), tool("generate_file")]
    return {"messages": MESSAGES, "tools": tools, **fields}
