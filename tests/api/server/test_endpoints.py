"""The endpoints beside generation: models, tokenizer, health, metrics, OpenAPI."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.api.api_server import CHAT, Running, engine_replying, ids, running
from support.api.fake_engine import model_info, step_stats

from chairlift.api.server.app import build_app
from chairlift.api.service import Service
from chairlift.api.settings import ServerSettings


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello world")) as server:
        yield server


async def test_models(server: Running) -> None:
    models = await server.openai.models.list()
    assert [model.id for model in models.data] == ["org/tiny"]
    status, body = await server.get("/v1/models/org/tiny")
    assert (status, body["id"], body["max_model_len"]) == (200, "org/tiny", 2048)
    assert body["input_modalities"] == ["text"]


async def test_a_restarted_engines_context_length_applies(server: Running) -> None:
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
    server.engine.degraded = "replica 1: the engine is being restarted"
    degraded = {"status": "ok", "degraded": server.engine.degraded}
    assert await server.get("/health") == (200, degraded)
    server.engine.degraded = None
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

    def references(node: Any) -> Iterator[str]:
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
    unlisted = {("GET", "/"), ("GET", "/metrics"), ("GET", "/openapi.json")}
    assert served - listed == unlisted
    assert listed <= served
    items = document["paths"]["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    assert [p["name"] for p in items] == ["response_id", "limit", "order", "after"]
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    events = chat["text/event-stream"]["schema"]["oneOf"]
    assert [event["$ref"].rpartition("/")[2] for event in events] == ["ChatChunk", "ErrorReply"]
