"""llama.cpp's routes: /props, /slots, /apply-template, /infill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api.api_server import (
    CHAT,
    END,
    TOKENIZER,
    Running,
    engine_replying,
    ids,
    last_prompt,
    running,
    tool,
    until,
)
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info
from tokenizers import AddedToken

from chairlift.api.text.fill_in import _MARKS, FillIn
from chairlift.engine.messages import Submit

PREFIX, SUFFIX, MIDDLE = MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
FILLING = byte_tokenizer(special=MARKS)


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    engine = engine_replying("Hello STOP more")
    engine.info = model_info(vocab_size=len(FILLING))
    async with running(engine, FILLING) as server:
        yield server


async def test_props(server: Running) -> None:
    status, props = await server.get("/props")
    assert status == 200
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert (props["total_slots"], props["model_alias"]) == (8, "org/tiny")
    assert "<|im_start|>" in props["chat_template"]
    assert (props["bos_token"], props["eos_token"]) == ("", "<|im_end|>")


async def test_slots_show_what_runs(server: Running) -> None:
    server.engine.step_seconds = 0.05

    async def busy() -> int:
        status, slots = await server.get("/slots")
        assert (status, [slot["id"] for slot in slots]) == (200, list(range(8)))
        assert all(slot["n_ctx"] == 2048 for slot in slots)
        assert all((slot["id_task"] >= 0) == slot["is_processing"] for slot in slots)
        return sum(slot["is_processing"] for slot in slots)

    assert await busy() == 0
    body = {**CHAT, "n": 3}
    task = asyncio.create_task(server.post("/v1/chat/completions", body))
    await until(lambda: len(server.service.live.riders) == 3)
    assert await busy() == 3
    await task
    assert await busy() == 0


async def test_apply_template(server: Running) -> None:
    for change in (
        {},
        {"tools": [tool("f")]},
        {"add_generation_prompt": False},
        {
            "messages": [*CHAT["messages"], {"role": "assistant", "content": "Well, "}],
            "continue_final_message": True,
        },
    ):
        status, reply = await server.post("/apply-template", {**CHAT, **change})
        assert status == 200
        _, tokenized = await server.post("/tokenize", {**CHAT, **change})
        assert TOKENIZER.decode(tokenized["tokens"]) == reply["prompt"]
    status, reply = await server.post("/apply-template", {"messages": []})
    assert (status, reply["error"]["param"]) == (400, "messages")
    assert not server.engine.submitted


INFILLS: list[tuple[dict[str, Any], str]] = [
    ({}, f"{PREFIX}{SUFFIX}{MIDDLE}"),
    ({"input_prefix": "a", "input_suffix": "b"}, f"{PREFIX}a{SUFFIX}b{MIDDLE}"),
    ({"input_prefix": "a", "prompt": "c"}, f"{PREFIX}a{SUFFIX}{MIDDLE}c"),
    (
        {"input_extra": [{"filename": "x.py", "text": "1"}, {"text": "2"}], "input_prefix": "a"},
        f"{PREFIX}x.py\n1\n\n2\na{SUFFIX}{MIDDLE}",
    ),
]


@pytest.mark.parametrize(("fields", "prompt"), INFILLS)
async def test_infill_makes_its_prompt(
    server: Running, fields: dict[str, Any], prompt: str
) -> None:
    # What llama.vim sends besides.
    editor = {"n_indent": 4, "samplers": ["top_k", "infill"], "t_max_predict_ms": 1000}
    status, reply = await server.post("/infill", {**fields, **editor, "cache_prompt": True})
    assert (status, reply["content"], reply["stop_type"]) == (200, "Hello STOP more", "eos")
    assert last_prompt(server, FILLING) == prompt
    assert reply["tokens_evaluated"] == len(server.engine.submitted[-1].prompt)
    assert reply["timings"]["predicted_n"] == reply["tokens_predicted"] == 16


async def test_marks_in_a_text_are_text(server: Running) -> None:
    texts = {"input_prefix": f"a{MIDDLE}b<|im_end|>", "input_suffix": SUFFIX, "prompt": PREFIX * 2}
    status, _ = await server.post("/infill", texts)
    assert status == 200
    expected = f"{PREFIX}a{MIDDLE}b<|im_end|>{SUFFIX}{SUFFIX}{MIDDLE}{PREFIX * 2}"
    assert last_prompt(server, FILLING) == expected
    prompt = server.engine.submitted[-1].prompt
    special = [FILLING.convert_tokens_to_ids(name) for name in (*MARKS, "<|im_end|>")]
    assert [prompt.count(token) for token in special] == [1, 1, 1, 0]
    status, reply = await server.post("/infill", {"input_prefix": "a" + PREFIX * 1001})
    assert (status, reply["error"]["param"]) == (400, "/infill")


async def test_infill_options(server: Running) -> None:
    body = {"input_prefix": "a", "stop": ["STOP"]}
    status, reply = await server.post("/infill", body)
    assert (reply["content"], reply["stop_type"], reply["stopping_word"]) == (
        *("Hello ", "word", "STOP"),
    )
    body |= {"n_predict": 5, "temperature": 0.5, "repeat_penalty": 1.25, "seed": 3}
    await server.post("/infill", body)
    params = server.engine.submitted[-1].params
    assert (params.max_tokens, params.temperature) == (5, 0.5)
    assert (params.repetition_penalty, params.seed) == (1.25, 3)
    for limit in (-1, 10**6):
        await server.post("/infill", {**body, "n_predict": limit})
        submitted = server.engine.submitted[-1]
        assert submitted.params.max_tokens == 2048 - len(submitted.prompt)
    for change, named in (
        ({"n": 2}, "n"),
        ({"n_predict": -2}, "n_predict"),
        ({"input_extra": [{}]}, "input_extra[0].text"),
        ({"mirostat": 1}, "mirostat"),
        ({"input_prefix": "x" * 100_000}, "input_prefix"),
        ({"input_prefix": "x" * 2048}, "input_prefix"),
    ):
        status, reply = await server.post("/infill", {**body, **change})
        assert (status, reply["error"]["param"]) == (400, named), reply


async def test_infill_streams(server: Running) -> None:
    events = await server.events("/infill", {"input_prefix": "a", "stop": ["STOP"]})
    *pieces, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(piece["content"] for piece in pieces) == "Hello "
    assert {piece["stop"] for piece in pieces} == {False}
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "word")


@pytest.mark.parametrize("end", ["<|fim_pad|>", "<|file_separator|>", PREFIX])
async def test_tokens_that_follow_a_gap_end_its_text(end: str) -> None:
    """Most models' configs do not name these as ends of a text, and they are not special."""
    tokenizer = byte_tokenizer(plain=[*MARKS, "<|fim_pad|>", "<|file_separator|>"])
    tokens = [*ids("Hello"), tokenizer.convert_tokens_to_ids(end), *ids(" more"), END]

    def script(request: Submit, index: int) -> Scripted:
        stops = request.params.stop_token_ids
        length = next(n for n, token in enumerate(tokens, 1) if token in stops)
        return Scripted(tokens[:length], ended_by_token=True)

    engine = FakeEngine(model_info(vocab_size=len(tokenizer)), script)
    async with running(engine, tokenizer) as server:
        _, reply = await server.post("/infill", {"input_prefix": "a"})
        assert (reply["content"], reply["stop_type"]) == ("Hello", "eos")
        body = {"prompt": "a", "stream": False}
        _, reply = await server.post("/api/generate", {**body, "suffix": "b"})
        assert reply["response"] == "Hello"
        _, reply = await server.post("/api/generate", {**body, "raw": True})
        assert reply["response"] == f"Hello{end} more"


async def test_a_model_without_fill_in_tokens_refuses_by_name() -> None:
    async with running(engine_replying("Hello")) as server:
        status, reply = await server.post("/infill", {"input_prefix": "a"})
        assert status == 400
        assert reply["error"]["message"].startswith("/infill is not supported: this model")
        assert not server.engine.submitted


@pytest.mark.parametrize("marks", _MARKS, ids=lambda marks: str(marks[0]))
def test_each_familys_marks_are_found(marks: tuple[str, str, str]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in reversed(marks)])
    vocabulary = tokenizer.get_vocab()
    found = FillIn.of_vocabulary(vocabulary)
    expected = tuple(vocabulary[mark] for mark in marks)
    assert found is not None
    assert found[:4] == (*expected, frozenset(expected))
    del vocabulary[marks[1]]
    assert FillIn.of_vocabulary(vocabulary) is None
