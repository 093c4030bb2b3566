"""Reasoning is separated from replies, sent back and bounded; a message can be continued."""

from __future__ import annotations

from typing import Any

import pytest
from support.api.api_server import MESSAGES, last_prompt, running, tool
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info
from support.api.tool_calls import PATH, engine_writing, reply_both_ways, skip_grammar_check

from chairlift.engine.messages import Thinking

# A template like Qwen3's: it opens or closes the thought in the prompt, if told to.
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if opened %}<think>\n{% elif not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
)
TAGS = ["<think>", "</think>"]
TOKENIZER = byte_tokenizer(_TEMPLATE, special=TAGS)
START, END = TOKENIZER.convert_tokens_to_ids(TAGS)
OPENED = {"chat_template_kwargs": {"opened": True}}
BODY = {"messages": MESSAGES}


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("opened", [True, False])
async def test_a_thought_is_separated_from_the_reply(opened: bool, chunk: int) -> None:
    text = "\nWell, é.\n\n  Hm \n</think>\n\n  Hello \n"
    body = {**BODY, **OPENED} if opened else BODY
    async with running(
        engine_writing(TOKENIZER, text if opened else "<think>" + text, chunk), TOKENIZER
    ) as server:
        reply = await reply_both_ways(server, body)
        assert reply.reasoning == "Well, é.\n\n  Hm"
        assert reply.content == "  Hello \n"
        assert reply.finish == "stop"
        assert last_prompt(server, TOKENIZER).endswith("<think>\n") == opened
        _, unstreamed = await server.post(PATH, body)
        details = unstreamed["usage"]["completion_tokens_details"]
        tokens = len(TOKENIZER.encode(text.split("\n\n  Hello")[0], add_special_tokens=False))
        assert details == {"reasoning_tokens": tokens + (not opened)}
        _, hello = await server.post(PATH, {**body, "logprobs": True, "stop": ["He", "Well"]})
        (choice,) = hello["choices"]
        assert choice["message"]["content"] == "  "
        assert choice["message"]["reasoning_content"] == reply.reasoning
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [" ", " "]


async def test_a_thought_that_never_ends_and_one_that_never_begins() -> None:
    async with running(
        engine_writing(TOKENIZER, "so so", ended_by_token=False, finish="length"), TOKENIZER
    ) as server:
        reply = await reply_both_ways(server, {**BODY, **OPENED})
        assert (reply.reasoning, reply.content, reply.finish) == ("so so", "", "length")
        reply = await reply_both_ways(
            server, {**BODY, "chat_template_kwargs": {"enable_thinking": False}}
        )
        assert (reply.reasoning, reply.content) == ("", "so so")


async def test_spelled_out_tags_are_text_if_the_tags_are_tokens() -> None:
    text = b"a <think> b"
    tokens = [TOKENIZER.encode(chr(byte), add_special_tokens=False)[0] for byte in text]
    engine = FakeEngine(
        model_info(vocab_size=len(TOKENIZER)), lambda *_: Scripted(tokens, finish="length")
    )
    async with running(engine, TOKENIZER) as server:
        reply = await reply_both_ways(server, BODY)
        assert (reply.content, reply.reasoning) == ("a <think> b", "")


async def test_tags_of_several_tokens() -> None:
    tokenizer = byte_tokenizer(_TEMPLATE, special=["<|channel>", "<channel|>"])
    text = "<|channel>thought\nHm<channel|>Hello <|channel>x"
    async with running(engine_writing(tokenizer, text, 3), tokenizer) as server:
        reply = await reply_both_ways(server, BODY)
        assert (reply.reasoning, reply.content) == ("Hm", "Hello <|channel>x")
        # The engine cannot detect a tag of several tokens, so the prompt opens the thought.
        await reply_both_ways(server, {**BODY, "thinking_token_budget": 5})
        assert last_prompt(server, tokenizer).endswith("assistant\n<|channel>thought")
        end = tokenizer.convert_tokens_to_ids("<channel|>")
        assert server.engine.submitted[-1].params.thinking == Thinking((end,), 5)


async def test_a_reply_of_a_required_form_may_contain_a_spelled_out_tag() -> None:
    tokenizer = byte_tokenizer(_TEMPLATE, special=["<|channel>", "<channel|>"])
    form = '{"a": "<|channel>thought b"}'
    text = [*"Hm", "<channel|>", *form]
    tokens = [tokenizer.encode(each, add_special_tokens=False)[0] for each in text]
    engine = FakeEngine(
        model_info(vocab_size=len(tokenizer)), lambda *_: Scripted(tokens, finish="length")
    )
    async with running(engine, tokenizer) as server:
        skip_grammar_check(server)
        body = {**BODY, "response_format": {"type": "json_object"}}
        reply = await reply_both_ways(server, body)
        assert last_prompt(server, tokenizer).endswith("assistant\n<|channel>thought")
        assert (reply.reasoning, reply.content) == ("Hm", form)


async def test_a_call_in_or_after_a_thought() -> None:
    template = _TEMPLATE + "{{ tools }}<|tool_call_start|>"
    special = [*TAGS, "<|tool_call_start|>", "<|tool_call_end|>"]
    tokenizer = byte_tokenizer(template, special=special)
    call = "<|tool_call_start|>[f()]<|tool_call_end|>"
    for text in (f"<think>a\n{call}", f"<think>a\n</think>\n\n{call}\n"):
        async with running(engine_writing(tokenizer, text), tokenizer) as server:
            reply = await reply_both_ways(server, {**BODY, "tools": [tool("f")]})
            assert (reply.reasoning, reply.content) == ("a", "")
            assert [call["name"] for call in reply.calls] == ["f"]


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        (OPENED, None),
        ({"thinking_token_budget": 0}, Thinking((END,), 0, START)),
        ({"thinking_token_budget": 7, **OPENED}, Thinking((END,), 7)),
        ({"response_format": {"type": "json_object"}, **OPENED}, Thinking((END,))),
        ({"response_format": {"type": "json_object"}}, Thinking((END,), None, START)),
        (
            {"thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": False}},
            None,
        ),
        ({"thinking_token_budget": 7, "reasoning_effort": "none"}, None),
    ],
)
async def test_the_engine_gets_the_limits_of_the_thought(
    fields: dict[str, Any], thinking: Thinking | None
) -> None:
    async with running(engine_writing(TOKENIZER, "x"), TOKENIZER) as server:
        skip_grammar_check(server)
        status, _ = await server.post(PATH, {**BODY, **fields})
        assert status == 200
        assert server.engine.submitted[0].params.thinking == thinking


async def test_thoughts_in_the_history_and_settings_reach_the_template() -> None:
    async with running(engine_writing(TOKENIZER, "x"), TOKENIZER) as server:
        for name in ("reasoning_content", "reasoning"):
            turn = {"role": "assistant", "content": "Hello", name: "Hm"}
            body = {"messages": [*MESSAGES, turn, *MESSAGES], "reasoning_effort": "low"}
            await reply_both_ways(server, body)
            assert "<think>\nHm\n</think>\n\nHello<|im_end|>" in last_prompt(server, TOKENIZER)
            assert last_prompt(server, TOKENIZER).endswith("assistant\nlow")
        status, reply = await server.post("/tokenize", {**BODY, **OPENED})
        assert status == 200
        assert TOKENIZER.decode(reply["tokens"]).endswith("<think>\n")


async def test_the_final_message_is_continued() -> None:
    async with running(engine_writing(TOKENIZER, " is Paris"), TOKENIZER) as server:
        turn = {"role": "assistant", "content": "The capital"}
        body = {"messages": [*MESSAGES, turn], "continue_final_message": True}
        reply = await reply_both_ways(server, body)
        assert reply.content == " is Paris"
        assert last_prompt(server, TOKENIZER).endswith("<|im_start|>assistant\nThe capital")
        turn["content"] = "<think>The capital"
        reply = await reply_both_ways(server, body)
        assert (reply.reasoning, reply.content) == (" is Paris", "")
        for change in (
            {"add_generation_prompt": True},
            {"messages": MESSAGES},
            {"messages": [*MESSAGES, {"role": "assistant", "content": ""}]},
        ):
            status, error = await server.post(PATH, {**body, **change})
            assert (status, error["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize("knows", [True, False])
async def test_developer_messages_become_system_ones_if_the_template_lacks_the_role(
    knows: bool,
) -> None:
    template = _TEMPLATE + ("{# developer #}" if knows else "")
    tokenizer = byte_tokenizer(template, special=TAGS)
    async with running(engine_writing(tokenizer, "x"), tokenizer) as server:
        message = {"role": "developer", "content": [{"type": "text", "text": "Brief"}]}
        await reply_both_ways(server, {"messages": [message, *MESSAGES]})
        role = "developer" if knows else "system"
        assert last_prompt(server, tokenizer).startswith(f"<|im_start|>{role}\nBrief<|im_end|>")
