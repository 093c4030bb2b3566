"""LoRA adapters in the API: their names, and loading and unloading them by requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.api.api_server import CHAT, Running, engine_replying, running, until
from support.api.batches import begin, ended, lines, request, results

from chairlift.api.admission.keys import NO_LIMITS, given_keys
from chairlift.api.openai.adapters import folder_below
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.client.adapters import AdapterTable
from chairlift.engine.errors import AdapterError
from chairlift.engine.messages import (
    AdapterFailed,
    AdapterLoaded,
    LoadAdapter,
    ToEngine,
    UnloadAdapter,
)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Adapters(AdapterTable):
    """Loads every folder at once, except those whose name begins with "bad"."""

    def __init__(self) -> None:
        super().__init__(self.answer, lambda: ())
        self.messages: list[ToEngine] = []

    def answer(self, message: ToEngine) -> None:
        self.messages.append(message)
        if isinstance(message, LoadAdapter):
            bad = Path(message.path).name.startswith("bad")
            failed = AdapterFailed(message.key, f"{message.path}: damaged or truncated")
            loaded = AdapterLoaded(message.key, "0" * 64, 8)
            asyncio.get_running_loop().call_soon(self.receive, failed if bad else loaded)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    return path


@asynccontextmanager
async def adapted(**settings: Any) -> AsyncIterator[tuple[Running, Adapters]]:
    """A server of the model "org/tiny" with the adapter "sql"."""
    adapters = Adapters()
    await adapters.load("sql", "/adapters/sql")
    async with running(engine_replying("ok", adapters=adapters), **settings) as server:
        yield server, adapters


BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {**CHAT, "max_tokens": 5}),
    ("/api/chat", {**CHAT, "stream": False}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_every_api_takes_an_adapter_as_a_model(path: str, body: dict[str, Any]) -> None:
    async with adapted() as (server, adapters):
        key = adapters.loaded["sql"].key
        for name, expected in (("sql", key), ("org/tiny:sql", key), ("org/tiny", "")):
            status, reply = await server.post(path, {**body, "model": name})
            assert status == 200, reply
            assert server.engine.submitted[-1].adapter == expected
        for name in ("sq", "sql:sql", "org/tiny:", "org/tiny:org/tiny", "other:sql", ":sql"):
            status, _ = await server.post(path, {**body, "model": name})
            assert status == 404, name


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_request_that_is_being_prepared_keeps_its_adapter(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with adapted() as (server, adapters):
        encode = Vocabulary.encode

        async def slow_encode(*args: Any, **options: Any) -> list[int]:
            if "sql" in adapters.loaded:
                adapters.unload("sql")
            assert not any(isinstance(sent, UnloadAdapter) for sent in adapters.messages)
            return await encode(*args, **options)

        monkeypatch.setattr(Vocabulary, "encode", slow_encode)
        key = adapters.loaded["sql"].key
        status, reply = await server.post(path, {**body, "model": "sql"})
        assert status == 200, reply
        assert server.engine.submitted[-1].adapter == key
        assert adapters.messages[-1] == UnloadAdapter(key)


async def test_batches_take_an_adapter_as_a_model(tmp_path: Path) -> None:
    settings = {"file_dir": tmp_path, "batch_concurrency": 1}
    names = ("sql", "org/tiny:sql", "org/tiny")
    content = lines(*(request(number, model=name) for number, name in enumerate(names)))
    async with adapted(**settings) as (server, adapters):
        batch = await ended(server.openai, (await begin(server.openai, content)).id)
        assert batch.status == "completed", batch.errors
        key = adapters.loaded["sql"].key
        assert [submit.adapter for submit in server.engine.submitted] == [key, key, ""]
        unknown = lines(request(0, model="org/tiny:other"))
        batch = await ended(server.openai, (await begin(server.openai, unknown)).id)
        assert (batch.status, server.engine.submitted[3:]) == ("failed", [])


async def test_an_adapter_that_is_gone_fails_its_lines_of_a_batch_only(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"file_dir": tmp_path, "batch_concurrency": 1}
    models = ("org/tiny",) * 4 + ("sql",) * 2
    content = lines(*(request(number, model=name) for number, name in enumerate(models)))
    adapters = Adapters()
    await adapters.load("sql", "/adapters/sql")
    slow = engine_replying("a", adapters=adapters, first_step_seconds=0.2)
    async with running(slow, **settings) as server:
        batch_id = (await begin(server.openai, content)).id
        await until(lambda: len(slow.submitted) >= 2)
    async with running(engine_replying("b"), **settings) as server:
        batch = await ended(server.openai, batch_id)
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 6, "completed": 4, "failed": 2}
        for line in await results(server.openai, batch.error_file_id):
            assert line["response"]["status_code"] == 404


async def test_models_lists_adapters_as_vllm_does() -> None:
    async with adapted() as (server, _):
        _, listed = await server.get("/v1/models")
        base, sql = listed["data"]
        assert (base["id"], base["parent"]) == ("org/tiny", None)
        assert (sql["id"], sql["root"], sql["parent"]) == ("sql", "/adapters/sql", "org/tiny")
        assert (await server.get("/v1/models/sql"))[1] == sql


async def test_requests_load_and_unload_adapters_below_the_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "adapters" / "poems")
    async with adapted(lora_dir=tmp_path / "adapters") as (server, adapters):
        status, card = await server.post(LOAD, {"lora_name": "poems", "lora_path": "poems"})
        assert (status, card["id"], card["parent"]) == (200, "poems", "org/tiny")
        assert card["root"] == str(folder)
        await server.post("/v1/chat/completions", {**CHAT, "model": "poems"})
        assert server.engine.submitted[-1].adapter == adapters.loaded["poems"].key
        again = {"lora_name": "poems", "lora_path": str(folder), "model": "sql"}
        status, reply = await server.post(LOAD, again)
        assert status == 400
        assert "loaded already" in reply["error"]["message"]
        before = adapters.loaded["poems"].key
        status, card = await server.post(LOAD, {**again, "load_inplace": True})
        assert (status, card["parent"]) == (200, "org/tiny")
        assert adapters.messages[-1] == UnloadAdapter(before)
        status, reply = await server.post(UNLOAD, {"lora_name": "poems"})
        assert (status, reply["deleted"]) == (200, True)
        status, _ = await server.post("/v1/chat/completions", {**CHAT, "model": "poems"})
        assert status == 404
        status, _ = await server.post(UNLOAD, {"lora_name": "poems"})
        assert status == 404


async def test_bad_requests_load_nothing(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    _folder(root / "good")
    _folder(root / "bad")
    _folder(tmp_path / "elsewhere")
    async with adapted(lora_dir=root) as (server, adapters):
        for body in (
            {"lora_name": "x", "lora_path": "bad"},
            {"lora_name": "x", "lora_path": "../elsewhere"},
            {"lora_name": "x", "lora_path": str(tmp_path / "elsewhere")},
            {"lora_name": "x", "lora_path": "missing"},
            {"lora_name": "x", "lora_path": "good\0"},
            {"lora_name": "x", "lora_path": ""},
            {"lora_name": "x"},
            {"lora_name": "", "lora_path": "good"},
            {"lora_name": "a\nb", "lora_path": "good"},
            {"lora_name": "x" * 300, "lora_path": "good"},
            {"lora_name": 7, "lora_path": "good"},
            {"lora_name": "org/tiny", "lora_path": "good"},
            {"lora_name": "org/tiny:latest", "lora_path": "good"},
        ):
            status, reply = await server.post(LOAD, body)
            assert status == 400, body
            assert "\n" not in reply["error"]["message"]
        assert list(adapters.loaded) == ["sql"]


async def test_a_load_during_which_the_engine_dies_may_be_tried_again(tmp_path: Path) -> None:
    _folder(tmp_path / "good")
    async with adapted(lora_dir=tmp_path) as (server, adapters):
        adapters._send = lambda message: adapters.fail_loading("the engine ended")
        async with server.http.post(
            server.url + LOAD, json={"lora_name": "x", "lora_path": "good"}
        ) as response:
            reply = await response.json()
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
        assert (reply["error"]["code"], reply["error"]["param"]) == ("unavailable", None)
        assert list(adapters.loaded) == ["sql"]


async def test_without_a_folder_requests_load_and_unload_nothing() -> None:
    async with adapted() as (server, adapters):
        for path, body in (
            (LOAD, {"lora_name": "x", "lora_path": "/etc"}),
            (UNLOAD, {"lora_name": "sql"}),
        ):
            status, reply = await server.post(path, body)
            assert status == 403
            assert "--lora-dir" in reply["error"]["message"]
        assert list(adapters.loaded) == ["sql"]


async def test_loading_needs_the_key_of_the_server(tmp_path: Path) -> None:
    _folder(tmp_path / "poems")
    keys = given_keys(["a-secret"], NO_LIMITS)
    async with adapted(lora_dir=tmp_path, keys=keys) as (server, adapters):
        body = {"lora_name": "poems", "lora_path": "poems"}
        assert (await server.post(LOAD, body))[0] == 401
        assert (await server.post(UNLOAD, {"lora_name": "sql"}))[0] == 401
        status, _ = await server.post(LOAD, body, Authorization="Bearer a-secret")
        assert status == 200
        assert set(adapters.loaded) == {"sql", "poems"}


def test_links_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    inside = _folder(root / "inside")
    outside = _folder(tmp_path / "outside")
    (root / "link").symlink_to(inside)
    (root / "out").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    _folder(root / "files")
    (root / "files" / "adapters.safetensors").symlink_to(outside / "adapter_config.json")
    assert folder_below(root, "link") == folder_below(root, str(inside)) == inside
    for name in ("out", "loop", "files", "..", ".", "", "missing", "inside/../../outside"):
        with pytest.raises(AdapterError, match="below that of --lora-dir"):
            folder_below(root, name)
