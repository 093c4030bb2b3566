"""Several models behind every API: routing, waiting for loads, states, the operator's routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api.api_server import MESSAGES, until
from support.api.fake_engine import step_stats
from support.api.pool_server import PoolServer, pool_server
from support.api.simulated_models import lazy

from chairlift.api.cli.main import main
from chairlift.api.models.entry import ModelPlan

PLANS = (
    ModelPlan("org/a", aliases=("gpt-4o",), memory=1),
    lazy("b"),
    lazy("c"),
)
# A request of each API without its model, and how to find the text of its reply.
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 64},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "x"},
}
KEEP_ALIVES = {
    "/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n',
    "/api/chat": b" ",
    "/api/generate": b" ",
}
COMMENT = b":"


@pytest.fixture
async def server() -> AsyncIterator[PoolServer]:
    async with pool_server(PLANS, budget=2, keep_alive_seconds=0.05) as server:
        yield server


async def streamed(server: PoolServer, path: str, model: str) -> tuple[int, bytes]:
    body = {**DOORS[path], "model": model, "stream": True}
    async with server.http.post(server.url + path, json=body) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("path", DOORS)
async def test_requests_go_to_their_model_and_load_it(server: PoolServer, path: str) -> None:
    body = {**DOORS[path], "stream": False}
    for name, replies in (
        *((None, "org/a"), ("gpt-4o", "org/a"), ("org/a", "org/a"), ("b", "b"), ("c", "c")),
    ):
        if name is None and path.startswith("/v1/messages"):
            continue  # it needs a model
        named = {} if name is None else {"model": name}
        status, reply = await server.post(path, {**body, **named})
        assert status == 200, reply
        assert f"I am {replies}" in json.dumps(reply)
    # There was memory for two.
    unloads = server.metric("chairlift_model_unloads_total", model_name="org/a", reason="memory")
    assert unloads == 1
    status, reply = await server.post(path, {**body, "model": "gpt-5"})
    assert status == 404
    assert "'org/a', 'b', 'c'" in json.dumps(reply)


@pytest.mark.parametrize("path", DOORS)
async def test_streams_get_keep_alives_while_their_model_loads(
    server: PoolServer, path: str
) -> None:
    loader = server.loaders["b"]
    loader.gate.clear()
    stream = asyncio.create_task(streamed(server, path, "b"))
    plain = asyncio.create_task(server.post(path, {**DOORS[path], "model": "b", "stream": False}))
    await until(lambda: len(server.entry("b").waiters) == 2)
    await asyncio.sleep(0.2)
    assert not stream.done()
    assert not plain.done()
    status, listed = await server.get("/v1/models")
    assert [card["state"] for card in listed["data"]] == ["loaded", "loading", "unloaded"]
    loader.gate.set()
    status, sent = await stream
    assert status == 200
    assert sent.startswith(KEEP_ALIVES.get(path, COMMENT))
    assert (await plain)[0] == 200
    # From the first event on, the stream is that of a loaded model.
    keep_alive = KEEP_ALIVES.get(path)
    events = sent.replace(keep_alive, b"") if keep_alive and keep_alive != b" " else sent
    lines = [line.lstrip() for line in events.splitlines() if line.strip()[:1] not in (b":", b"")]
    _, again = await streamed(server, path, "b")
    assert len(lines) == len([line for line in again.splitlines() if line.strip()[:1] != b""])


@pytest.mark.parametrize("path", DOORS)
async def test_a_failed_load_ends_streams_and_requests_with_its_reason(
    server: PoolServer, path: str
) -> None:
    loader = server.loaders["b"]
    loader.gate.clear()
    loader.error = "model.safetensors: damaged"
    waiting = [
        asyncio.create_task(streamed(server, path, "b")),
        asyncio.create_task(server.post(path, {**DOORS[path], "model": "b", "stream": False})),
    ]
    await until(lambda: len(server.entry("b").waiters) == 2)
    await asyncio.sleep(0.2)
    loader.gate.set()
    (status, sent), (plain_status, reply) = await asyncio.gather(*waiting)
    assert (status, plain_status) == (200, 503)
    assert b"model.safetensors: damaged" in sent
    assert "model.safetensors: damaged" in json.dumps(reply)
    if path.startswith("/v1/"):
        assert b"event: error" in sent or sent.endswith(b"data: [DONE]\n\n")
    # The others are untouched, and the server is healthy.
    assert (await server.post(path, {**DOORS[path], "model": "org/a", "stream": False}))[0] == 200
    status, health = await server.get("/health")
    assert (status, health["models"]) == (200, {"org/a": "loaded", "b": "failed", "c": "unloaded"})
    status, card = await server.get("/v1/models/b")
    assert (card["state"], card["reason"]) == ("failed", "model.safetensors: damaged")
    assert server.metric("chairlift_model_loads_total", model_name="b", outcome="failure") == 1
    await until(lambda: not any(entry.leases for entry in server.service.models.entries))


async def test_a_request_is_refused_when_its_model_cannot_be_loaded_in_time(
    server: PoolServer,
) -> None:
    server.loaders["b"].seconds = 0.5
    assert (await server.post("/v1/models/b/load"))[0] == 200
    assert (await server.post("/v1/models/b/unload"))[0] == 200
    body = {**DOORS["/v1/completions"], "model": "b", "timeout": 0.2}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
    assert server.entry("b").state == "unloaded", "it was refused before the load"
    # Nothing is known about c, so the request waits for as long as it may.
    server.loaders["c"].gate.clear()
    server.entry("b").load_seconds = server.entry("org/a").load_seconds = None
    async with server.http.post(
        f"{server.url}/v1/completions", json={**body, "model": "c"}
    ) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1


async def test_a_client_that_leaves_while_its_model_loads_leaves_nothing_behind(
    server: PoolServer,
) -> None:
    loader = server.loaders["b"]
    loader.gate.clear()
    for path in DOORS:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.15):
                await streamed(server, path, "b")
    await until(lambda: not server.entry("b").waiters)
    loader.gate.set()
    await until(lambda: server.entry("b").state == "loaded")
    assert server.entry("b").leases == 0
    assert (await server.post("/v1/models/b/unload"))[0] == 200


async def test_operators_load_and_unload_models(server: PoolServer) -> None:
    status, card = await server.post("/v1/models/b/load")
    assert (status, card["id"], card["state"], card["max_model_len"]) == (200, "b", "loaded", 2048)
    # By its alias, and with a slash in its id.
    for name in ("gpt-4o", "org/a"):
        status, card = await server.post(f"/v1/models/{name}/unload")
        assert (status, card["state"], card["aliases"]) == (200, "unloaded", ["gpt-4o"])
    status, listed = await server.get("/api/ps")
    assert [model["name"] for model in listed["models"]] == ["b:latest"]
    status, listed = await server.get("/api/tags")
    assert [model["name"] for model in listed["models"]] == ["org/a:latest", "b:latest", "c:latest"]
    engine = server.loaders["b"].engine
    assert engine is not None
    engine.unfinished = 1
    status, reply = await server.post("/v1/models/b/unload")
    assert (status, reply["error"]["code"]) == (409, "model_busy")
    engine.unfinished = 0
    for action in ("load", "unload"):
        assert (await server.post(f"/v1/models/none/{action}"))[0] == 404
    assert server.metric("chairlift_model_unloads_total", model_name="org/a", reason="request") == 1


async def test_the_engine_metrics_are_told_apart_by_model(server: PoolServer) -> None:
    for name in ("org/a", "b"):
        await server.post("/v1/completions", {"prompt": "x", "model": name})
        engine = server.loaders[name].engine
        assert engine is not None
        engine.on_step(step_stats())
    for name in ("org/a", "b"):
        rows = server.metric(
            "chairlift_step_duration_seconds_count", model_name=name, phase="total"
        )
        assert rows == 1
        assert server.metric("vllm:num_requests_running", model_name=name, engine="0") == 3
    await server.post("/v1/models/b/unload")
    assert server.metric("vllm:num_requests_running", model_name="b", engine="0") == 0
    assert server.metric("chairlift_model_loaded", model_name="b") == 0
    assert server.metric("chairlift_models_memory_bytes", kind="budget") == 2


async def test_the_command_lists_loads_and_unloads(
    server: PoolServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(*arguments: str) -> tuple[int, str, str]:
        command = ["models", *arguments, "--base-url", server.url]
        code = await asyncio.to_thread(main, command)
        return code, *capsys.readouterr()

    code, listed, _ = await run("--loaded")
    assert (code, [line.split()[:2] for line in listed.splitlines()]) == (
        0,
        [["NAME", "STATE"], ["org/a", "loaded"], ["b", "unloaded"], ["c", "unloaded"]],
    )
    assert "gpt-4o" in listed
    code, listed, _ = await run("load", "b")
    assert (code, listed.splitlines()[1].split()[:2]) == (0, ["b", "loaded"])
    assert server.entry("b").state == "loaded"
    code, listed, _ = await run("unload", "org/a", "--json")
    assert (code, json.loads(listed)[0]["state"]) == (0, "unloaded")
    code, _, error = await run("load", "none")
    assert code == 1
    assert len(error.splitlines()) == 1
    assert "'org/a', 'b', 'c'" in error


@pytest.mark.parametrize("words", [["load"], ["unload"], ["load", "a", "b"], ["--loaded", "x"]])
def test_the_command_refuses_other_words(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["models", *words])
    assert "load or unload with the name of one model" in capsys.readouterr().err
