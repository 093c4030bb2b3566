"""gpt-oss's Harmony format in every API, streamed and not; its prompts, budgets and grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api.api_server import MESSAGES, chosen, last_prompt, running, tool
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info
from support.api.harmony import CALL, EXAMPLES, SPECIAL, TOKENIZER, Example, body, token
from support.api.tool_calls import PATH, reply_both_ways, skip_grammar_check
from support.api.truncated_replies import vocabulary

from chairlift.api.text.chat_format import HARMONY_TAGS, ThinkTags, chat_format
from chairlift.api.text.harmony import HARMONY
from chairlift.engine.errors import ModelError
from chairlift.engine.grammar.language import compiled, lexicon
from chairlift.engine.messages import Grammar, Thinking

SCHEMA = {
    "type": "object",
    "properties": {"location": {"type": "string", "maxLength": 9}},
    "required": ["location"],
}
PREAMBLE = EXAMPLES["preamble"]


def engine_for(example: Example, chunk: int = 1) -> FakeEngine:
    tokens = [
        *TOKENIZER.encode(example.text, add_special_tokens=False),
        token(example.ended_by),
    ]
    return FakeEngine(
        model_info(vocab_size=len(TOKENIZER)),
        lambda *_: Scripted(tokens, chunk=chunk, ended_by_token=True),
    )


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("name", EXAMPLES)
async def test_chat_completions(name: str, chunk: int) -> None:
    example = EXAMPLES[name]
    async with running(engine_for(example, chunk), TOKENIZER) as server:
        reply = await reply_both_ways(server, body())
        assert (reply.reasoning, reply.content) == (example.reasoning, example.content)
        assert [[call["name"], call["arguments"]] for call in reply.calls] == example.calls
        assert reply.finish == ("tool_calls" if example.calls else "stop")
        prompt = last_prompt(server, TOKENIZER)
        assert prompt.endswith("<|start|>assistant")
        assert '"get_weather"' in prompt


async def test_responses() -> None:
    tools = [{"type": "function", "name": name} for name in ("get_weather", "generate_file")]
    async with running(engine_for(PREAMBLE), TOKENIZER) as server:
        sent = {"input": "Hi", "tools": tools}
        status, reply = await server.post("/v1/responses", sent)
        assert status == 200
        thought, message, call = reply["output"]
        assert thought["content"][0]["text"] == PREAMBLE.reasoning
        assert message["content"][0]["text"] == PREAMBLE.content
        assert [[call["name"], call["arguments"]]] == PREAMBLE.calls
        events = await server.named_events("/v1/responses", sent)
        deltas = [
            e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"
        ]
        assert "".join(deltas) == PREAMBLE.calls[0][1]
        assert len(deltas) > 10
        output = events[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]


async def test_messages() -> None:
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("get_weather", "generate_file")]
    async with running(engine_for(PREAMBLE), TOKENIZER) as server:
        sent = {"messages": MESSAGES, "tools": tools, "max_tokens": 500}
        status, reply = await server.post("/v1/messages", sent)
        assert status == 200
        thought, text, call = reply["content"]
        assert (thought["thinking"], text["text"]) == (PREAMBLE.reasoning, PREAMBLE.content)
        assert call["input"] == json.loads(PREAMBLE.calls[0][1])
        assert reply["stop_reason"] == "tool_use"
        events = await server.named_events("/v1/messages", sent)
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        assert "".join(d.get("thinking", "") for d in deltas) == PREAMBLE.reasoning
        assert "".join(d.get("text", "") for d in deltas) == PREAMBLE.content
        assert "".join(d.get("partial_json", "") for d in deltas) == PREAMBLE.calls[0][1]


async def test_ollama() -> None:
    tools = [tool("get_weather"), tool("generate_file")]
    async with running(engine_for(PREAMBLE), TOKENIZER) as server:
        sent = {"model": server.service.model().name, "messages": MESSAGES, "tools": tools}
        status, reply = await server.post("/api/chat", {**sent, "stream": False})
        assert status == 200, reply
        message = reply["message"]
        assert (message["thinking"], message["content"]) == (PREAMBLE.reasoning, PREAMBLE.content)
        (call,) = message["tool_calls"]
        assert call["function"]["arguments"] == json.loads(PREAMBLE.calls[0][1])


async def test_a_conversation_goes_back_to_the_template() -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}
        for name in ("get_weather", "generate_file")
    ]
    called = {"role": "assistant", "content": "Plan", "reasoning": "Hm", "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": "generate_file", "content": "made"},
        {"role": "tool", "tool_call_id": "get_weather", "content": "sunny"},
    ]
    answer = {"role": "assistant", "content": "Done.", "reasoning_content": "x"}
    async with running(engine_for(EXAMPLES["chat"]), TOKENIZER) as server:
        history = [*MESSAGES, called, *results, answer, *MESSAGES]
        await reply_both_ways(server, body(messages=history, reasoning_effort="low"))
        prompt = last_prompt(server, TOKENIZER)
    turn = (
        "<|start|>assistant<|channel|>analysis<|message|>Hm\n\nPlan<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"a": 1}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
        "<|start|>assistant to=functions.generate_file<|channel|>commentary json<|message|>"
        '{"a": 1}<|call|>'
        '<|start|>functions.generate_file to=assistant<|channel|>commentary<|message|>"made"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Done.<|end|>"
    )
    assert turn in prompt
    assert "Reasoning: low" in prompt


async def test_instructions_that_the_template_would_drop() -> None:
    roles = ["system", "developer", "user", "system", "developer", "user"]
    sent = [{"role": role, "content": f"text {n}"} for n, role in enumerate(roles)]
    async with running(engine_for(EXAMPLES["chat"]), TOKENIZER) as server:
        await reply_both_ways(server, {"messages": sent})
        prompt = last_prompt(server, TOKENIZER)
    assert prompt == (
        "<|start|>system<|message|>text 0\n\ntext 1<|end|>"
        + "".join(f"<|start|>user<|message|>text {n}<|end|>" for n in range(2, 6))
        + "<|start|>assistant"
    )


async def test_each_result_follows_its_call() -> None:
    """Clients may use an id again in a later turn, and send results in any order or none."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    turn = {"role": "assistant", "tool_calls": [{**call, "id": "a"}, {**call, "id": "b"}]}
    results = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("b", "a", "x")]
    async with running(engine_for(EXAMPLES["chat"]), TOKENIZER) as server:
        await reply_both_ways(server, body(messages=[*MESSAGES, turn, *results, turn, results[1]]))
        prompt = last_prompt(server, TOKENIZER)
    order = [part[:1] for part in prompt.split('commentary<|message|>"')[1:]]
    assert order == ["a", "b", "x", "a"]
    assert prompt.count("to=functions.get_weather") == 4


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


ANALYSIS = "<|start|>assistant<|channel|>analysis<|message|>"
JSON_REPLY = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "prompt_end", "thinking"),
    [
        ({}, "<|start|>assistant", None),
        ({"thinking_token_budget": 5}, ANALYSIS, Thinking(ids("<|end|>"), 5)),
        (
            {**JSON_REPLY, "tools": []},
            ANALYSIS,
            Thinking(ids("<|end|><|start|>assistant<|channel|>final<|message|>")),
        ),
        (
            {**JSON_REPLY, "tools": [], "reasoning_effort": "none"},
            "<|start|>assistant<|channel|>final<|message|>",
            None,
        ),
        (JSON_REPLY, ANALYSIS, Thinking(ids("<|end|><|start|>assistant"))),
        (
            {"tool_choice": "required", "thinking_token_budget": 7},
            ANALYSIS,
            Thinking(ids("<|end|><|start|>assistant"), 7),
        ),
        ({"tool_choice": "required", "reasoning_effort": "none"}, "<|start|>assistant", None),
    ],
)
async def test_where_a_grammar_begins(
    fields: dict[str, Any], prompt_end: str, thinking: Thinking | None
) -> None:
    async with running(engine_for(EXAMPLES["chat"]), TOKENIZER) as server:
        skip_grammar_check(server)
        status, _ = await server.post(PATH, body(**fields))
        assert status == 200
        assert last_prompt(server, TOKENIZER).endswith(prompt_end)
        params = server.engine.submitted[-1].params
        assert params.thinking == thinking
        assert (params.grammar is None) == (not set(fields) & {"response_format", "tool_choice"})


async def test_constrained_replies_are_read() -> None:
    """The prompt contains the beginning of the thought, or of the text."""
    text = 'Hm<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}'
    cases = [
        ({"tools": []}, Example(text, "<|return|>", "", "", []), ("Hm", '{"a": 1}', [])),
        (
            {"tools": [], "reasoning_effort": "none"},
            Example('{"a": 1}', "<|return|>", "", "", []),
            ("", '{"a": 1}', []),
        ),
        (
            {"tool_choice": chosen("get_weather"), "response_format": None},
            Example(
                "Hm<|end|><|start|>assistant" + EXAMPLES["call"].text.split("assistant")[1],
                CALL,
                "",
                "",
                [],
            ),
            ("Hm", "", ["get_weather"]),
        ),
    ]
    for fields, example, (reasoning, content, names) in cases:
        async with running(engine_for(example), TOKENIZER) as server:
            skip_grammar_check(server)
            reply = await reply_both_ways(server, body(**{**JSON_REPLY, **fields}))
            assert (reply.reasoning, reply.content) == (reasoning, content)
            assert [call["name"] for call in reply.calls] == names


async def sent_grammar(**fields: Any) -> Grammar:
    async with running(engine_for(EXAMPLES["chat"]), TOKENIZER) as server:
        skip_grammar_check(server)
        sent = body(**{"tools": [tool("get_weather", SCHEMA)], **fields})
        status, reply = await server.post(PATH, sent)
        assert status == 200, reply
        grammar = server.engine.submitted[-1].params.grammar
        assert grammar is not None
        return grammar


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the grammar allows all tokens of ``text`` and then the end."""
    words = vocabulary(TOKENIZER)
    matcher = compiled(grammar, lexicon(TOKENIZER, words.size).load())
    tokens = list(ids(text))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


async def test_the_grammar_of_a_call() -> None:
    header = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    final = "<|channel|>final<|message|>"
    required = await sent_grammar(tool_choice="required")
    assert accepts(required, header + '{"location": "Basel"}')
    assert not accepts(required, header + '{"location": 1}')
    assert not accepts(required, final + "{}")
    either = await sent_grammar(**JSON_REPLY)
    assert accepts(either, header + '{"location": "Basel"}')
    assert accepts(either, final + '{"a": 1}')
    assert not accepts(either, final + "a")


async def test_a_grammar_of_text_together_with_functions_is_refused() -> None:
    async with running(engine_for(EXAMPLES["chat"]), TOKENIZER) as server:
        status, reply = await server.post(PATH, body(guided_regex="a+"))
        assert status == 400
        assert "cannot be combined with tools" in reply["error"]["message"]


async def test_the_final_message_is_continued() -> None:
    async with running(
        engine_for(Example(" is Paris.", "<|return|>", "", "", [])), TOKENIZER
    ) as server:
        turn = {"role": "assistant", "content": "The capital"}
        sent = {"messages": [*MESSAGES, turn], "continue_final_message": True}
        reply = await reply_both_ways(server, sent)
        assert (reply.content, reply.reasoning) == (" is Paris.", "")
        assert last_prompt(server, TOKENIZER).endswith("final<|message|>The capital")


def test_flags_that_name_another_format_are_refused() -> None:
    for accepted in ((None, None), (HARMONY, HARMONY_TAGS)):
        assert chat_format(TOKENIZER, *accepted).harmony is not None
    with pytest.raises(ModelError, match="--tool-parser json"):
        chat_format(TOKENIZER, "json")
    with pytest.raises(ModelError, match="--think-tags <a> </a>"):
        chat_format(TOKENIZER, None, ThinkTags("<a>", "</a>"))
    with pytest.raises(ModelError, match="lacks its tokens"):
        chat_format(byte_tokenizer(special=SPECIAL[:3]), HARMONY)
