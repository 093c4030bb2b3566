"""Ollama's routes over HTTP: lines, errors, prompts of /api/generate, and GET /."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api.api_server import (
    Running,
    ending,
    engine_replying,
    ids,
    last_prompt,
    running,
)
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info
from support.api.thinking_caller import TOKENIZER as CALLER
from support.api.thinking_caller import thinking_caller

from chairlift.api.admission.keys import ApiKey, KeyLimits, digest_of
from chairlift.engine.messages import Submit

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


async def lines(server: Running, path: str, body: Any) -> list[dict[str, Any]]:
    async with server.http.post(server.url + path, json=body) as response:
        assert response.headers["Content-Type"] == "application/x-ndjson"
        text = await response.text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


async def test_a_stream_is_one_object_a_line_even_if_it_is_kept_alive() -> None:
    slow = FakeEngine(model_info(), ending("Hello"), first_step_seconds=0.3)
    async with running(slow, keep_alive_seconds=0.1) as server:
        async with server.http.post(server.url + "/api/chat", json=CHAT) as response:
            text = await response.text()
        assert text.startswith(" ")
        *parts, last = [json.loads(line) for line in text.splitlines()]
        assert "".join(part["message"]["content"] for part in parts) == "Hello"
        assert [part["done"] for part in parts] == [False] * 5
        assert last["done"] is True
        assert last["created_at"].endswith("Z")
        assert (last["done_reason"], last["eval_count"], last["load_duration"]) == ("stop", 6, 0)
        assert last["total_duration"] >= 300_000_000


async def test_a_body_is_json_whatever_its_type() -> None:
    # curl -d and LiteLLM declare no JSON, as Ollama's own examples.
    form = "application/x-www-form-urlencoded"
    bodies = {
        "/api/chat": {**CHAT, "stream": False},
        "/api/generate": {"prompt": "Hi", "stream": False},
        "/api/embed": {"input": "Hi"},
        "/api/embeddings": {"prompt": "Hi"},
        "/api/show": {"model": "org/tiny"},
    }
    async with running(engine_replying("Hello")) as server:

        async def status(path: str, **headers: str) -> int:
            async with server.http.post(
                server.url + path,
                data=json.dumps(bodies[path]).encode(),
                headers={name.replace("_", "-"): value for name, value in headers.items()},
                skip_auto_headers=["Content-Type"],
            ) as response:
                return response.status

        for path in bodies:
            assert await status(path) == 200
            assert await status(path, Content_Type=form) == 200
            # A page elsewhere may send these types unasked.
            for types in ({}, {"Content_Type": form}):
                assert await status(path, Origin="http://evil.example", **types) == 403


async def test_a_format_allows_no_properties_that_it_does_not_mention() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with running(engine_replying('{"a": 1}')) as server:
        for path, body in (("/api/chat", CHAT), ("/api/generate", {"prompt": "Hi"})):
            await lines(server, path, {**body, "format": schema})
            grammar = server.engine.submitted[-1].params.grammar
            assert grammar is not None
            assert json.loads(grammar.text) == {**schema, "additionalProperties": False}


async def test_a_failed_stream_ends_with_an_error_line() -> None:
    dying = FakeEngine(
        model_info(), lambda request, index: Scripted(ids("ab"), "error", error="it broke")
    )
    async with running(dying) as server:
        for path, body in (("/api/chat", CHAT), ("/api/generate", {"prompt": "Hi"})):
            *_, error = await lines(server, path, body)
            assert error == {"error": "it broke"}


async def test_line_breaks_in_a_calls_arguments_stay_inside_a_line() -> None:
    text = '<tool_call>\n{"name": "f",\n "arguments": {\n"a":\n"x\\ny"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    def script(request: Submit, index: int) -> Scripted:
        tokens = CALLER.encode(text, add_special_tokens=False)
        return Scripted([*tokens, CALLER.eos_token_id], ended_by_token=True)

    engine = FakeEngine(model_info(vocab_size=len(CALLER)), script)
    async with running(engine, CALLER) as server:
        for format in ({}, {"format": "json"}):
            got = await lines(server, "/api/chat", {**CHAT, **format, "tools": tools})
            [call] = [c for line in got for c in line["message"].get("tool_calls", ())]
            assert call["function"] == {"index": 0, "name": "f", "arguments": {"a": "x\ny"}}


async def test_a_cut_call_is_left_out() -> None:
    engine = thinking_caller()
    script = engine.script

    def cut(request: Submit, index: int) -> Scripted:
        tokens = script(request, index).tokens
        return Scripted(tokens[: request.params.max_tokens], "length")

    engine.script = cut
    tools = [{"function": {"name": "get_weather"}}]
    counts = set()
    async with running(engine, CALLER) as server:
        for limit in range(20, 200, 3):
            body = {**CHAT, "tools": tools, "options": {"num_predict": limit}, "stream": False}
            status, reply = await server.post("/api/chat", body)
            assert status == 200
            calls = reply["message"].get("tool_calls", [])
            assert all(list(c["function"]["arguments"]) == ["city"] for c in calls)
            counts.add(len(calls))
    assert counts == {0, 1, 2}


async def test_generate_makes_its_prompts() -> None:
    tokenizer = byte_tokenizer(special=MARKS)
    engine = engine_replying("Hello")
    engine.info = model_info(vocab_size=len(tokenizer))
    user = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nBe brief<|im_end|>\n"
    async with running(engine, tokenizer) as server:
        for fields, prompt in (
            ({}, user),
            ({"system": "Be brief"}, system + user),
            ({"raw": True}, "Hi"),
            ({"suffix": "!"}, f"{MARKS[0]}Hi{MARKS[1]}!{MARKS[2]}"),
            ({"suffix": "!", "prompt": ""}, f"{MARKS[0]}{MARKS[1]}!{MARKS[2]}"),
            ({"template": "", "context": [], "images": [], "width": 0}, user),
        ):
            status, _ = await server.post(
                "/api/generate", {"prompt": "Hi", **fields, "stream": False}
            )
            assert (status, last_prompt(server, tokenizer)) == (200, prompt)
        _, shown = await server.post("/api/show", {"name": "org/tiny"})
        assert shown["capabilities"] == ["completion", "tools", "insert"]
        server.engine.submitted.clear()
        for fields, named in (
            ({"raw": True, "system": "Be brief"}, "system"),
            ({"raw": True, "suffix": "!"}, "suffix"),
            ({"raw": True, "think": True}, "think"),
            ({"think": True}, "think"),
            ({"template": "{{ .Prompt }}"}, "template"),
            ({"context": [1]}, "context"),
            ({"images": ["aGk="]}, "takes no images"),
            ({"images": ["aGk="], "raw": True}, "images"),
            ({"images": "aGk="}, "images"),
            ({"images": [1]}, "images"),
            ({"steps": 4}, "steps"),
            ({"format": "xml"}, "format"),
            ({"format": ["json"]}, "format"),
            ({"truncate": True}, "truncate"),
            ({"model": "llama3"}, "llama3"),
            ({"temperature": 0.5}, "temperature"),
        ):
            status, reply = await server.post("/api/generate", {"prompt": "Hi", **fields})
            assert status in (400, 404), fields
            assert named in reply["error"], fields
        assert not server.engine.submitted


async def test_a_model_without_a_template_continues_the_prompt() -> None:
    tokenizer = byte_tokenizer(None)
    async with running(engine_replying("Hello"), tokenizer) as server:
        status, reply = await server.post("/api/generate", {"prompt": "Hi", "stream": False})
        assert (status, reply["response"]) == (200, "Hello")
        assert last_prompt(server, tokenizer) == "Hi"
        status, reply = await server.post("/api/chat", CHAT)
        assert (status, "chat template" in reply["error"]) == (400, True)
        _, shown = await server.post("/api/show", {"model": "org/tiny:latest"})
        assert shown["capabilities"] == ["completion"]


async def test_requests_without_a_prompt_only_check_the_model() -> None:
    async with running(engine_replying("Hello")) as server:
        for path in ("/api/chat", "/api/generate"):
            status, reply = await server.post(path, {"model": "org/tiny", "keep_alive": 0})
            assert (status, reply["done"], reply["done_reason"]) == (200, True, "load")
            assert (await server.post(path, {"model": "llama3"}))[0] == 404
        for body in ({}, {"input": ""}, {"input": []}, {"input": None}):
            status, reply = await server.post("/api/embed", {"model": "org/tiny", **body})
            assert (status, reply["embeddings"]) == (200, [])
        for body in ({}, {"prompt": ""}):
            assert await server.post("/api/embeddings", body) == (200, {"embedding": []})
        for path in ("/api/embed", "/api/embeddings"):
            assert (await server.post(path, {"model": "llama3"}))[0] == 404
        assert not server.engine.submitted


@pytest.mark.parametrize("on_cpu", [True, False])
async def test_weights_are_in_a_gpus_memory_only_where_one_computes(on_cpu: bool) -> None:
    info = model_info(device="Intel(R) Xeon(R) Processor", on_cpu=on_cpu)
    async with running(FakeEngine(info, ending("a"))) as server:
        _, listed = await server.get("/api/ps")
        [model] = listed["models"]
        assert model["size_vram"] == (0 if on_cpu else model["size"])


@pytest.mark.parametrize("ui", [False, True])
async def test_the_root_answers(ui: bool) -> None:
    async with running(engine_replying("Hello"), ui=ui) as server:
        async with server.http.get(server.url + "/") as response:
            assert response.status == 200
            assert (await response.text() == "Ollama is running") is not ui
        async with server.http.head(server.url + "/") as response:
            assert response.status == 200


async def test_errors_have_ollamas_form_everywhere_below_the_path() -> None:
    keys = (ApiKey("alice", digest_of("sk-alice-secret"), KeyLimits(rpm=2)),)
    async with running(engine_replying("Hello"), keys=keys, max_body_bytes=1000) as server:

        async def status(method: str, path: str, body: Any, key: str = "sk-alice-secret") -> int:
            async with server.http.request(
                method, server.url + path, json=body, headers={"Authorization": f"Bearer {key}"}
            ) as response:
                reply = await response.json()
                assert set(reply) == {"error"}
                assert isinstance(reply["error"], str)
                return response.status

        assert await status("POST", "/api/chat", CHAT, key="wrong") == 401
        assert await status("GET", "/api/tags", None, key="wrong") == 401
        assert await status("POST", "/api/pull", {"model": "llama3"}) == 404
        assert await status("DELETE", "/api/delete", {"model": "llama3"}) == 404
        assert await status("GET", "/api/chat", None) == 405
        assert await status("POST", "/api/chat", {"messages": [], "options": "x" * 1000}) == 413
        assert await status("POST", "/api/chat", [1]) == 400
        assert await status("POST", "/api/chat", CHAT) == 429
        assert (await server.get("/api/version"))[0] == 200
