"""OpenAI's own client, unmodified and strict, at /v1/responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import openai
import pytest
from pydantic import BaseModel
from support.api.api_server import Running, ending, ids, running
from support.api.fake_engine import FakeEngine, Scripted, model_info
from support.api.thinking_caller import (
    ANSWER,
    CITIES,
    PARAMETERS,
    TEXT,
    THOUGHT,
    TOKENIZER,
    WEATHER,
    thinking_caller,
)

MODEL = "org/tiny"


class Resort(BaseModel):
    name: str
    lifts: int


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(model_info(), ending("Hello"))) as server:
        yield server


async def test_create_and_go_on(server: Running) -> None:
    responses = server.openai.responses
    first = await responses.create(model=MODEL, input="Hi", instructions="Be brief", top_logprobs=2)
    assert first.output_text == "Hello"
    assert (first.status, first.incomplete_details, first.error) == ("completed", None, None)
    assert first.usage is not None
    assert first.usage.total_tokens == first.usage.input_tokens + 6
    logprobs = first.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == list("Hello")
    assert len(logprobs[0].top_logprobs) == 2
    second = await responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "Again"}],
        previous_response_id=first.id,
        metadata={"a": "b"},
    )
    assert second.previous_response_id == first.id
    assert (await responses.retrieve(second.id)).metadata == {"a": "b"}
    items = [item async for item in responses.input_items.list(second.id, limit=1, order="asc")]
    assert [item.content[0].text for item in items] == ["Hi", "Hello", "Again"]
    # The output can be sent back unchanged.
    again = await responses.create(model=MODEL, input=[*first.output], store=False)
    assert again.output_text == "Hello"
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(again.id)
    await responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        await responses.cancel(first.id)


async def test_stream(server: Running) -> None:
    async with server.openai.responses.stream(model=MODEL, input="Hi") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Hello"
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.snapshot for event in deltas] == ["H", "He", "Hel", "Hell", "Hello"]
    raw = await server.openai.responses.create(model=MODEL, input="Hi", stream=True)
    numbers = [event.sequence_number async for event in raw]
    assert numbers == list(range(len(events)))


async def test_an_incomplete_stream_and_a_failed_one(server: Running) -> None:
    server.engine.script = lambda request, index: Scripted(ids("Hel"), "length")
    async with server.openai.responses.stream(model=MODEL, input="Hi") as stream:
        *_, last = [event async for event in stream]
    assert (last.type, last.response.output_text) == ("response.incomplete", "Hel")
    assert last.response.incomplete_details.reason == "max_output_tokens"
    server.engine.script = lambda request, index: Scripted(ids("ab"), "error", error="it broke")
    async with server.openai.responses.stream(model=MODEL, input="Hi") as stream:
        *_, error, last = [event async for event in stream]
    assert (error.type, error.message) == ("error", "it broke")
    assert (last.type, last.response.error.message) == ("response.failed", "it broke")


async def test_structured_output_is_parsed(server: Running) -> None:
    server.engine.script = ending('{"name": "Zermatt", "lifts": 32}')
    reply = await server.openai.responses.parse(model=MODEL, input="Hi", text_format=Resort)
    assert reply.output_parsed == Resort(name="Zermatt", lifts=32)
    grammar = server.engine.submitted[0].params.grammar
    assert grammar is not None
    assert set(json.loads(grammar.text)["properties"]) == {"name", "lifts"}
    reply = await server.openai.responses.create(
        model=MODEL, input="Hi", text={"format": {"type": "json_object"}}
    )
    assert reply.text is not None
    assert reply.text.format.type == "json_object"


async def test_errors_of_responses_have_the_clients_own_types(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await server.openai.responses.create(model=MODEL, input="Hi", conversation="conv_1")
    assert bad.value.param == "conversation"
    with pytest.raises(openai.BadRequestError) as missing:
        await server.openai.responses.create(model=MODEL, input="Hi", previous_response_id="resp_x")
    assert missing.value.body == {
        "message": "Previous response with id 'resp_x' not found.",
        "type": "invalid_request_error",
        "param": "previous_response_id",
        "code": "previous_response_not_found",
    }


# Thoughts and calls

TOOL = {"type": "function", "name": WEATHER, "parameters": PARAMETERS, "strict": False}
CALLED = [{"city": city} for city in CITIES]


async def test_thoughts_and_calls_are_kept_by_the_client_or_by_the_server() -> None:
    async with running(thinking_caller(), TOKENIZER) as server:
        body = {"model": MODEL, "tools": [TOOL], "include": ["reasoning.encrypted_content"]}
        first = await server.openai.responses.create(input="Weather?", **body)
        thought, text, *calls = first.output
        assert [part.text for part in thought.content] == [THOUGHT]
        assert text.content[0].text == first.output_text == TEXT
        assert [json.loads(call.arguments) for call in calls] == CALLED
        assert {call.name for call in calls} == {WEATHER}
        assert first.usage.output_tokens_details.reasoning_tokens == len(THOUGHT) + 4
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            for call in calls
        ]
        stored = await server.openai.responses.create(
            input=results, previous_response_id=first.id, **body
        )
        assert stored.output_text == ANSWER
        by_server = server.engine.submitted[-1].prompt
        stateless = await server.openai.responses.create(
            input=[{"role": "user", "content": "Weather?"}, *first.output, *results],
            store=False,
            **body,
        )
        assert stateless.output_text == ANSWER
        assert server.engine.submitted[-1].prompt == by_server
        prompt = TOKENIZER.decode(by_server)
        assert f"<think>{THOUGHT}</think>{TEXT}<tool_call>" in prompt
        assert prompt.count("<|im_start|>tool\nsunny") == 2
        items = await server.openai.responses.input_items.list(stored.id, order="asc")
        assert [item.type for item in items.data] == [
            *("message", "reasoning", "message", "function_call", "function_call"),
            *("function_call_output", "function_call_output"),
        ]


async def test_thoughts_and_calls_in_a_stream() -> None:
    async with running(thinking_caller(), TOKENIZER) as server:
        body = {"model": MODEL, "input": "Weather?", "tools": [TOOL]}
        async with server.openai.responses.stream(**body) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == [
            *("reasoning", "message", "function_call", "function_call")
        ]
        assert [call.parsed_arguments for call in final.output[2:]] == [None, None]
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [json.loads(event.arguments) for event in done] == CALLED
        thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        assert (len(thoughts) > 1, "".join(thoughts)) == (True, THOUGHT)
        # Each item is added and done before the next one.
        bounds = [e for e in events if e.type.startswith("response.output_item.")]
        assert [(e.type[21:], e.output_index) for e in bounds] == [
            (end, index) for index in range(4) for end in ("added", "done")
        ]


async def test_tool_choice_and_reasoning_effort_are_respected() -> None:
    async with running(thinking_caller(), TOKENIZER) as server:
        await server.openai.responses.create(
            model=MODEL,
            input="Weather?",
            tools=[TOOL],
            tool_choice={"type": "function", "name": WEATHER},
            reasoning={"effort": "none", "summary": "auto"},
        )
        [submitted] = server.engine.submitted
        assert submitted.params.grammar is not None
        assert TOKENIZER.decode(submitted.prompt).endswith("<think></think>")
