"""The API over a real socket, with the official client in strict mode and a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.api.api_server import CHAT, END, MESSAGES, TOKENIZER, Running, ending, ids, running
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info, step_stats

from chairlift.api.server.app import build_app
from chairlift.api.service import Service
from chairlift.api.settings import ServerSettings
from chairlift.api.text.logprobs import clamp
from chairlift.engine.messages import Submit


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(model_info(), ending("Hello world"))) as server:
        yield server


# Chat


async def test_chat(server: Running) -> None:
    reply = await server.openai.chat.completions.create(model="org/tiny", messages=MESSAGES)
    assert reply.choices[0].message.content == "Hello world"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs is None
    assert reply.system_fingerprint
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(server.engine.submitted[0].prompt) == rendered
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(ids(rendered))
    assert reply.usage.completion_tokens == len("Hello world") + 1
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    params = server.engine.submitted[0].params
    assert params.max_tokens == 2048 - len(ids(rendered))
    assert params.stop_token_ids == (END,)


async def test_chat_stream(server: Running) -> None:
    stream = await server.openai.chat.completions.create(
        model="org/tiny",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    *rest, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in rest)
    assert rest[0].choices[0].delta.role == "assistant"
    assert rest[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in rest[-2:]] == [None, "stop"]
    assert rest[-1].choices[0].delta.content is None
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_on_the_wire(server: Running) -> None:
    chunks = await server.chunks("/v1/chat/completions", CHAT)
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 1
    with_usage = await server.chunks(
        "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}
    )
    assert all(chunk["usage"] is None for chunk in with_usage[:-1])
    assert with_usage[-1]["usage"]["total_tokens"] > 0


async def test_message_contents_and_roles(server: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief", "name": None},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "ok", "refusal": None},
        {"role": "user", "content": "go"},
    ]
    status, _ = await server.post("/v1/chat/completions", {"messages": messages})
    assert status == 200
    text = TOKENIZER.decode(server.engine.submitted[0].prompt)
    assert text.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>")


async def test_a_template_that_refuses_is_a_400(server: Running) -> None:
    messages = [*MESSAGES, {"role": "user", "content": "42", "name": "nobody"}]
    status, body = await server.post("/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert "nobody speaks" in body["error"]["message"]
    assert body["error"]["param"] == "messages"


async def test_a_model_without_a_template_is_a_400() -> None:
    async with running(FakeEngine(model_info(), ending("x")), byte_tokenizer(None)) as server:
        status, body = await server.post("/v1/chat/completions", CHAT)
        assert status == 400
        assert "chat template" in body["error"]["message"]
        status, body = await server.post("/v1/completions", {"prompt": "x"})
        assert status == 200


async def test_sampling_parameters_reach_the_engine(server: Running) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "logit_bias": {"5": -100, "6": 1.5},
        "seed": 7,
        "min_tokens": 2,
        "max_completion_tokens": 9,
        "stop_token_ids": [3],
        "ignore_eos": True,
    }
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    harmless = {"user": "me", "store": False, "service_tier": "auto", "metadata": {"a": "b"}}
    body = {**CHAT, **asked, **nothing, **harmless, "top_logprobs": None, "audio": None}
    status, _ = await server.post("/v1/chat/completions", body)
    assert status == 200
    params = server.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.1, -1)
    assert (params.frequency_penalty, params.logit_bias) == (2, {5: -100.0, 6: 1.5})
    assert (params.seed, params.min_tokens, params.max_tokens) == (7, 2, 9)
    assert (params.stop_token_ids, params.logprobs) == ((3,), None)


async def test_without_a_seed_every_request_has_its_own(server: Running) -> None:
    for _ in range(2):
        await server.post("/v1/chat/completions", {**CHAT, "top_k": -1})
    first, second = server.engine.submitted
    assert first.params.seed != second.params.seed
    assert first.params.top_k == 0


# Completions


async def test_completion(server: Running) -> None:
    reply = await server.openai.completions.create(model="org/tiny", prompt="Say")
    assert reply.choices[0].text == "Hello world"
    assert server.engine.submitted[0].params.max_tokens == 16
    assert server.engine.submitted[0].prompt == ids("Say")


async def test_completion_keeps_its_leading_space() -> None:
    async with running(FakeEngine(model_info(), ending(" Paris"))) as server:
        _status, body = await server.post("/v1/completions", {"prompt": "It is", "echo": True})
        assert body["choices"][0]["text"] == "It is Paris"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "bc"], [ids("a"), ids("bc")]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([1, 2], [[1, 2]]),
    ],
)
async def test_prompt_shapes(server: Running, prompt: Any, expected: list[list[int]]) -> None:
    status, body = await server.post("/v1/completions", {"prompt": prompt})
    assert status == 200
    assert sorted(request.prompt for request in server.engine.submitted) == sorted(expected)
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))


async def test_n_and_several_prompts_with_echo() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted(ids(f"-{index}"), finish="length")

    async with running(FakeEngine(model_info(), script)) as server:
        body = {"prompt": ["a", "b"], "n": 2, "echo": True}
        status, reply = await server.post("/v1/completions", body)
        assert status == 200
        texts = [(choice["index"], choice["text"]) for choice in reply["choices"]]
        assert texts == [(0, "a-0"), (1, "a-1"), (2, "b-0"), (3, "b-1")]
        assert len(server.engine.submitted) == 2
        assert reply["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 8,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        streamed = {0: "", 1: "", 2: "", 3: ""}
        finishes = []
        for chunk in await server.chunks("/v1/completions", body):
            (choice,) = chunk["choices"]
            streamed[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                finishes.append((choice["index"], choice["finish_reason"]))
        assert streamed == dict(texts)
        assert sorted(finishes) == [(index, "length") for index in range(4)]


async def test_completion_stream(server: Running) -> None:
    # Not the strict client: its type of a completion forbids the null finish_reason that OpenAI
    # itself streams before a choice's end.
    client = server.openai.with_options(_extra_kwargs={"_strict_response_validation": False})
    stream = await client.completions.create(model="org/tiny", prompt="Say", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"


# The prefix cache


async def test_the_salt_reaches_every_prompt_of_a_request(server: Running) -> None:
    salt = "é" * 256
    await server.post("/v1/chat/completions", {**CHAT, "cache_salt": salt})
    await server.post("/v1/completions", {"prompt": ["a", "b"], "cache_salt": "mine"})
    await server.post("/v1/completions", {"prompt": "c"})
    await server.post("/v1/completions", {"prompt": "d", "cache_salt": None})
    salts = [request.cache_salt for request in server.engine.submitted]
    assert salts == [salt, "mine", "mine", "", ""]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "It is"}),
        ("/v1/completions", {"prompt": ["It is", "a long", "x"]}),
    ],
)
async def test_usage_tells_what_came_from_the_prefix_cache(
    path: str, body: dict[str, Any], n: int
) -> None:
    def script(request: Submit, index: int) -> Scripted:
        # The engine tells every choice.
        return Scripted(ids("abc"), finish="length", cached_tokens=len(request.prompt) // 2)

    async with running(FakeEngine(model_info(max_rows=16), script)) as server:
        body = {**body, "n": n}
        _, whole = await server.post(path, body)
        prompts = [len(request.prompt) for request in server.engine.submitted]
        cached = sum(length // 2 for length in prompts)
        assert cached > 0
        assert whole["usage"]["prompt_tokens"] == sum(prompts)
        assert whole["usage"]["completion_tokens"] == 3 * n * len(prompts)
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
        with_usage = {**body, "stream_options": {"include_usage": True}}
        *rest, last = await server.chunks(path, with_usage)
        assert all(chunk["usage"] is None for chunk in rest)
        assert last["usage"] == whole["usage"]


async def test_a_choice_that_a_stop_string_ends_still_tells_what_was_cached() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted(ids("abcdef"), chunk=6, cached_tokens=2)

    async with running(FakeEngine(model_info(), script)) as server:
        _, reply = await server.post("/v1/completions", {"prompt": "xyz", "stop": "b"})
        assert reply["choices"][0]["text"] == "a"
        assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_the_fingerprint_changes_with_the_kv_quantization() -> None:
    seen = set()
    for bits, size in ((None, None), (8, 64), (4, 64), (4, 32)):
        info = model_info(kv_bits=bits, kv_group_size=size)
        async with running(FakeEngine(info, ending("x"))) as server:
            _, reply = await server.post("/v1/completions", {"prompt": "x"})
            seen.add(reply["system_fingerprint"])
    assert len(seen) == 4


# Stop strings and log-probabilities


async def test_stop_strings_end_a_choice_and_free_its_row(server: Running) -> None:
    body = {**CHAT, "stop": ["o w"], "logprobs": True, "top_logprobs": 2}
    _, reply = await server.post("/v1/chat/completions", body)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "Hell"
    assert choice["finish_reason"] == "stop"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list("Hell")
    assert len(server.engine.stopped) == 1
    assert reply["usage"]["completion_tokens"] == len("Hello w")
    chunks = await server.chunks("/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == "Hell"
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == 1
    _status, reply = await server.post(
        "/v1/chat/completions", {**body, "include_stop_str_in_output": True}
    )
    assert reply["choices"][0]["message"]["content"] == "Hello w"


async def test_steps_that_arrive_together_are_told_token_by_token_and_stop_in_the_middle() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted(ids("abcdefgh" if index else "ab"), finish="length")

    engine = FakeEngine(model_info(), script, steps_at_once=4)
    async with running(engine) as server:
        body = {**CHAT, "n": 2, "stop": "fg", "stream_options": {"include_usage": True}}
        *chunks, last = await server.chunks("/v1/chat/completions", body)
        told: dict[int, list[str]] = {0: [], 1: []}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            told[choice["index"]].append(choice["delta"].get("content", choice["finish_reason"]))
        assert told == {0: ["", "a", "b", "length"], 1: ["", "a", "b", "c", "d", "e", "stop"]}
        assert last["usage"]["completion_tokens"] == 2 + 7
        assert len(engine.stopped) == 1


async def test_chat_logprobs_in_strict_mode() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted([*ids("é!"), END], ended_by_token=True)

    async with running(FakeEngine(model_info(), script)) as server:
        reply = await server.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
        assert reply.choices[0].logprobs is not None
        content = reply.choices[0].logprobs.content
        assert content is not None
        assert [entry.token for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
        assert [entry.bytes for entry in content] == [[0xC3], [0xA9], [33]]
        assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
        stream = await server.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, logprobs=True, stream=True
        )
        tokens = []
        async for chunk in stream:
            logprobs = chunk.choices[0].logprobs
            tokens += [entry.token for entry in (logprobs.content or [])] if logprobs else []
        assert tokens == [entry.token for entry in content]


async def test_completion_logprobs(server: Running) -> None:
    reply = await server.openai.completions.create(model="org/tiny", prompt="x", logprobs=3)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("Hello world")
    assert logprobs.text_offset == list(range(11))
    assert logprobs.token_logprobs == [-0.5] * 11
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 3 for top in logprobs.top_logprobs)


async def test_logprobs_of_minus_infinity_are_valid_json() -> None:
    assert clamp(float("-inf")) == -9999.0
    assert clamp(-1.5) == -1.5


async def test_special_tokens_are_hidden_unless_asked_for() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted([*ids("a"), END, *ids("b")], finish="length")

    async with running(FakeEngine(model_info(), script)) as server:
        body = {"prompt": "x", "ignore_eos": True}
        _, reply = await server.post("/v1/completions", body)
        assert reply["choices"][0]["text"] == "ab"
        _, reply = await server.post("/v1/completions", {**body, "skip_special_tokens": False})
        assert reply["choices"][0]["text"] == "a<|im_end|>b"


# The rest


async def test_models(server: Running) -> None:
    models = await server.openai.models.list()
    assert [model.id for model in models.data] == ["org/tiny"]
    status, body = await server.get("/v1/models/org/tiny")
    assert (status, body["id"], body["max_model_len"]) == (200, "org/tiny", 2048)


async def test_an_engine_that_is_started_anew_tells_how_much_room_there_is(server: Running) -> None:
    server.engine.info = model_info(max_context=512)
    _, body = await server.get("/v1/models/org/tiny")
    assert body["max_model_len"] == 512
    assert (await server.post("/v1/chat/completions", CHAT))[0] == 200
    (request,) = server.engine.submitted
    assert len(request.prompt) + request.params.max_tokens == 512


async def test_tokenize_and_back(server: Running) -> None:
    status, body = await server.post("/tokenize", {"prompt": "hé"})
    assert (status, body) == (200, {"count": 3, "max_model_len": 2048, "tokens": ids("hé")})
    status, back = await server.post("/detokenize", {"tokens": body["tokens"]})
    assert (status, back) == (200, {"prompt": "hé"})
    status, body = await server.post("/tokenize", {**CHAT, "return_token_strs": True})
    assert "".join(body["token_strs"]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for bad in ({}, {"prompt": "x", **CHAT}, {"prompt": 5}):
        status, _ = await server.post("/tokenize", bad)
        assert status == 400
    for tokens in ([99999], [-1], ["x"], "x", None):
        status, _ = await server.post("/detokenize", {"tokens": tokens})
        assert status == 400


async def test_health_ping_version(server: Running) -> None:
    assert await server.get("/health") == (200, {"status": "ok"})
    assert (await server.get("/ping"))[0] == 200
    assert (await server.post("/ping", b""))[0] == 200
    status, body = await server.get("/version")
    assert status == 200
    assert body["version"]


async def test_request_ids(server: Running) -> None:
    async def id_of(sent: str | None) -> str:
        headers = {} if sent is None else {"X-Request-Id": sent}
        async with server.http.get(f"{server.url}/health", headers=headers) as response:
            return response.headers["X-Request-Id"]

    assert await id_of("mine-1") == "mine-1"
    assert await id_of("no spaces please") != "no spaces please"
    assert await id_of("x" * 500) != "x" * 500
    assert await id_of(None) != await id_of(None)


async def test_metrics(server: Running) -> None:
    server.engine.on_step(step_stats())
    await server.chunks("/v1/chat/completions", CHAT)
    async with server.http.get(f"{server.url}/metrics") as response:
        text = await response.text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert "vllm:time_to_first_token_seconds" in families
    assert "vllm:request_success" in families
    assert "process_resident_memory_bytes" in families
    assert server.metric(
        "chairlift_http_requests_total",
        route="/v1/chat/completions",
        method="POST",
        status="200",
    )
    assert server.metric("vllm:request_params_n_count", model_name="org/tiny", engine="0") == 1


async def test_openapi(server: Running) -> None:
    status, document = await server.get("/openapi.json")
    assert status == 200
    schemas = document["components"]["schemas"]
    assert {"ChatRequest", "ChatCompletion", "ChatChunk", "ErrorReply"} <= set(schemas)
    for name in ("ChatRequest", "CompletionRequest"):
        salt = schemas[name]["properties"]["cache_salt"]
        assert {"type": "string", "minLength": 1, "maxLength": 256} in salt["anyOf"]
        assert "cache_salt" not in schemas[name]["required"]
    details = schemas["PromptTokensDetails"]
    assert details["properties"]["cached_tokens"] == {"type": "integer"}
    assert details["required"] == ["cached_tokens"]

    def references(node: Any) -> AsyncIterator[str] | Any:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    served = {
        (route.method, route.resource.canonical)
        for route in build_app(Service(ServerSettings(ui=False))).router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    listed = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert served - listed == {("GET", "/metrics"), ("GET", "/openapi.json")}
    assert listed <= served
    items = document["paths"]["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    assert [p["name"] for p in items] == ["response_id", "limit", "order", "after"]
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    events = chat["text/event-stream"]["schema"]["oneOf"]
    assert [event["$ref"].rpartition("/")[2] for event in events] == ["ChatChunk", "ErrorReply"]


async def test_one_write_for_all_choices_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    original: Callable[..., Awaitable[None]] = aiohttp.web.StreamResponse.write

    async def write(self: aiohttp.web.StreamResponse, data: bytes) -> None:
        writes.append(data)
        await original(self, data)

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write", write)
    engine = FakeEngine(model_info(), ending("abc"), step_seconds=0.01)
    async with running(engine) as server:
        await server.chunks("/v1/completions", {"prompt": "x", "n": 4})
    # three letters, the end, [DONE]
    assert len(writes) == 5
    assert writes[0].count(b"data: ") == 4
