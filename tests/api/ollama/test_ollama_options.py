"""Ollama's options: done, ignored or refused by name. Its messages become those of a chat."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ollama import Options
from support.api.api_server import Running, engine_replying, fix_seeds, last_prompt, running
from support.paths import ROOT

from chairlift.api.ollama.dialogue import messages_of
from chairlift.api.ollama.options import OllamaOptions
from chairlift.api.ollama.request import OllamaMessage

PATHS = ("/api/chat", "/api/generate")
BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/api/chat": BODY,
    "/api/generate": {"prompt": "Hi", "stream": False},
}
# The engine's sampling parameter, and its value, for each option that has an effect.
DONE: dict[str, tuple[Any, str, Any]] = {
    "num_predict": (7, "max_tokens", 7),
    "temperature": (0.5, "temperature", 0.5),
    "top_k": (9, "top_k", 9),
    "top_p": (0.25, "top_p", 0.25),
    "min_p": (0.125, "min_p", 0.125),
    "repeat_penalty": (1.5, "repetition_penalty", 1.5),
    "presence_penalty": (-0.5, "presence_penalty", -0.5),
    "frequency_penalty": (0.75, "frequency_penalty", 0.75),
    "seed": (11, "seed", 11),
}
# Other values than the neutral ones are refused.
REFUSED: dict[str, tuple[list[Any], list[Any]]] = {
    "typical_p": ([1, 1.0], [0.5, "1", True]),
    "tfs_z": ([1, 1.0], [2]),
    "mirostat": ([0], [1, 2, False]),
    "penalize_newline": ([True], [False, 1]),
}
WRONG: dict[str, list[Any]] = {
    "num_predict": [-3, "7", 2**31, 1.5],
    "temperature": [-1, 3, "hot"],
    "top_p": [-0.1, 1.5],
    "min_p": [-0.1, 2],
    "repeat_penalty": [0, 1000],
    "seed": [2**64, "x"],
    "stop": ["", [""], [1], {"a": 1}, ["x"] * 17],
    "top_k": [-2, True],
}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    async with running(engine_replying("Hello STOP more")) as server:
        fix_seeds(server, monkeypatch)
        yield server


async def post(server: Running, path: str, **options: Any) -> tuple[int, Any]:
    server.engine.submitted.clear()
    return await server.post(path, {**BODIES[path], "options": options})


@pytest.mark.parametrize("path", PATHS)
async def test_options_become_sampling_parameters(server: Running, path: str) -> None:
    await post(server, path)
    plain = server.engine.submitted[0].params
    for option, (value, field, expected) in DONE.items():
        status, _ = await post(server, path, **{option: value})
        params = server.engine.submitted[0].params
        assert (status, getattr(params, field)) == (200, expected), option
        assert getattr(plain, field) != expected, option
    _, reply = await post(server, path, stop=["nothing", "STOP"])
    text = reply["response"] if path == "/api/generate" else reply["message"]["content"]
    assert (text, reply["done_reason"]) == ("Hello ", "stop")
    for same in ({"seed": -1}, *({"num_predict": n} for n in (0, -1, -2, 10**6)), {"top_k": -1}):
        await post(server, path, **same)
        assert server.engine.submitted[0].params == plain, same


@pytest.mark.parametrize("path", PATHS)
async def test_other_options_are_ignored_or_refused_by_name(server: Running, path: str) -> None:
    await post(server, path)
    plain = server.engine.submitted[0].params
    ignored = OllamaOptions.model_fields.keys() - DONE.keys() - REFUSED.keys() - {"stop"}
    for option in ignored:
        for value in (1, -1.5, True, "x", [1], {"a": 1}):
            assert (await post(server, path, **{option: value}))[0] == 200
            assert server.engine.submitted[0].params == plain, option
    for option, (neutral, others) in REFUSED.items():
        for value in neutral:
            assert (await post(server, path, **{option: value}))[0] == 200
            assert server.engine.submitted[0].params == plain, option
        for value in others:
            status, reply = await post(server, path, **{option: value})
            assert (status, server.engine.submitted) == (400, [])
            assert reply["error"].startswith(f"options.{option}: is not supported"), reply
    for option, values in WRONG.items():
        for value in values:
            status, reply = await post(server, path, **{option: value})
            assert (status, server.engine.submitted) == (400, []), (option, value)
            assert reply["error"].startswith(f"options.{option}"), reply


def test_every_option_of_the_client_is_known_and_documented() -> None:
    assert Options.model_fields.keys() <= OllamaOptions.model_fields.keys()
    page = (ROOT / "docs" / "reference" / "fields.md").read_text().partition("## `options`")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| (done|ignored|refused)\b", page, re.M))
    assert rows.keys() == OllamaOptions.model_fields.keys()
    assert {name for name, kind in rows.items() if kind == "done"} == {*DONE, "stop"}
    assert {name for name, kind in rows.items() if kind == "refused"} == {*REFUSED}


async def test_a_long_prompt_is_refused_and_a_long_num_predict_is_not(server: Running) -> None:
    for path, field in (("/api/chat", "messages"), ("/api/generate", "prompt")):
        long: Any = "x" * 4000
        value = [{"role": "user", "content": long}] if field == "messages" else long
        status, reply = await server.post(path, {**BODIES[path], field: value})
        assert (status, "context" in reply["error"]) == (400, True)
    for fields in ({"raw": True, "prompt": "x" * 4000}, {"raw": True, "prompt": "x" * 40_000}):
        status, reply = await server.post("/api/generate", {**fields, "stream": False})
        assert (status, "context" in reply["error"]) == (400, True)


def converted(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return messages_of([OllamaMessage.model_validate(message) for message in messages])


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"a": 1}}, **fields}


def test_results_are_matched_to_their_calls() -> None:
    turns = [
        {"role": "assistant", "tool_calls": [call("f"), call("g"), call("f", id="mine")]},
        {"role": "tool", "tool_name": "f", "content": "1"},
        {"role": "tool", "tool_name": "f", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "tool_name": "other", "content": "4"},
        {"role": "tool", "tool_call_id": "given", "content": "5"},
        {"role": "assistant", "thinking": "so", "tool_calls": [call("f")]},
        {"role": "tool", "content": "6"},
    ]
    calls, *results, again, last = converted(*turns)
    identities = [one["id"] for one in calls["tool_calls"]]
    assert identities == ["call00000", "call00001", "mine"]
    assert [result["tool_call_id"] for result in results] == [
        *("call00000", "mine", "call00001", None, "given")
    ]
    assert calls["tool_calls"][0]["function"]["arguments"] == '{"a":1}'
    assert again["reasoning_content"] == "so"
    assert last["tool_call_id"] == again["tool_calls"][0]["id"] == "call00003"


async def test_the_reply_continues_a_last_message_of_the_assistant(server: Running) -> None:
    turns = [*BODY["messages"], {"role": "assistant", "content": "Well, "}]  # type: ignore[misc]
    await server.post("/api/chat", {**BODY, "messages": turns})
    assert last_prompt(server).endswith("<|im_start|>assistant\nWell, ")
    turns[-1] = {"role": "assistant", "content": ""}
    await server.post("/api/chat", {**BODY, "messages": turns})
    assert last_prompt(server).endswith("<|im_start|>assistant\n")
