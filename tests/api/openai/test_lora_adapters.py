"""LoRA adapters in the API: their names, and loading and unloading them by requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.api.api_server import CHAT, Running, engine_replying, running

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
        again = {"lora_name": "poems", "lora_path": str(folder)}
        status, reply = await server.post(LOAD, again)
        assert status == 400
        assert "loaded already" in reply["error"]["message"]
        before = adapters.loaded["poems"].key
        status, _ = await server.post(LOAD, {**again, "load_inplace": True})
        assert status == 200
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
        ):
            status, reply = await server.post(LOAD, body)
            assert status == 400, body
            assert "\n" not in reply["error"]["message"]
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
