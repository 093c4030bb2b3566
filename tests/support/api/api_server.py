"""The real application on a real socket around a scripted engine, and ways to talk to it."""

from __future__ import annotations

import asyncio
import atexit
import io
import json
import random
import ssl
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info

from chairlift.api.openai.batches.storage import STORAGE, Storage
from chairlift.api.responses.store import RESPONSE_STORE, ResponseStore
from chairlift.api.schemas.sampling_defaults import SamplingDefaults
from chairlift.api.server.listen import listen
from chairlift.api.server.sockets import bind
from chairlift.api.service import MODULES, ServedModel, Service
from chairlift.api.settings import ServerSettings
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.messages import Submit
from chairlift.engine.workers.job import Job
from chairlift.engine.workers.pool import Workers

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
NEUTRAL = SamplingDefaults()
_FOLDERS = tempfile.TemporaryDirectory(prefix="chairlift-")
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def ending(text: str) -> Callable[[Submit, int], Scripted]:
    """A script in which every choice is ``text`` and then the end token."""
    return lambda request, index: Scripted([*ids(text), END], ended_by_token=True)


def engine_replying(text: str, **settings: Any) -> FakeEngine:
    """An engine whose every choice is ``text``; ``settings`` are FakeEngine's."""
    return FakeEngine(model_info(), ending(text), **settings)


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """An entry of a chat request's ``tools``: a function; ``fields`` are further ones of it."""
    function = {"name": name, "parameters": parameters or {"type": "object"}, **fields}
    return {"type": "function", "function": function}


def chosen(name: str) -> dict[str, Any]:
    """The ``tool_choice`` that requires a call of the function ``name``."""
    return {"type": "function", "function": {"name": name}}


@dataclass
class Running:
    """A server on a socket, its parts, and clients that are connected to it."""

    url: str
    service: Service
    engine: FakeEngine
    response_store: ResponseStore
    storage: Storage
    http: aiohttp.ClientSession
    openai: AsyncOpenAI

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Posts JSON, or ``body`` itself if it is bytes; returns status and parsed reply."""
        # NOTE: aiohttp warns about bytes of more than a mebibyte, but not about a file.
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Content-Type": "application/json", **headers}
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            assert response.headers["X-Request-Id"]
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: Any) -> list[str]:
        """A stream's events, as sent on the wire."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            assert response.headers["Cache-Control"] == "no-cache"
            assert response.headers["X-Accel-Buffering"] == "no"
            text = await response.text()
        assert text.endswith("\n\n")
        return text.removesuffix("\n\n").split("\n\n")

    async def named_events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """A stream's events as objects; checks that each one's name is its ``type``."""
        events = []
        for event in await self.events(path, body):
            name, data = event.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events

    async def chunks(self, path: str, body: Any) -> list[Any]:
        """A successful stream's chunks, without the [DONE] that it must end with."""
        events = await self.events(path, body)
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    def metric(self, name: str, **labels: str) -> float | None:
        return self.service.recorder.registry.get_sample_value(name, labels)


def last_prompt(server: Running, tokenizer: TokenizerWrapper = TOKENIZER) -> str:
    """The text of the prompt that the engine was given last."""
    return str(tokenizer.decode(server.engine.submitted[-1].prompt))


@cache
def _certificates() -> ssl.SSLContext:
    """Shared, because loading the certificates takes longer than starting the server."""
    return ssl.create_default_context()


@cache
def _shared_workers() -> Workers:
    workers = Workers(MODULES)
    atexit.register(workers.close)
    return workers


class LentWorkers(Workers):
    """The worker processes that all servers of a test process share: each takes long to start."""

    def warm(self) -> None:
        _shared_workers().warm()

    def close(self) -> None:
        """Leaves the processes to the next server."""

    @property
    def pids(self) -> list[int]:
        return _shared_workers().pids

    def _submit(self, job: Job) -> Future[Any]:
        return _shared_workers()._submit(job)


@asynccontextmanager
async def running(
    engine: FakeEngine,
    tokenizer: TokenizerWrapper = TOKENIZER,
    defaults: SamplingDefaults = NEUTRAL,
    name: str = "org/tiny",
    **settings: Any,
) -> AsyncIterator[Running]:
    """Serves ``engine`` on the loopback.

    Args:
        engine: its ``info`` is None while the model loads.
        tokenizer: the model's.
        defaults: the model's default sampling.
        name: the model's id.
        settings: further fields of ServerSettings.
    """
    # A folder that exists once a test uses it.
    usual = {"drain_seconds": 1.0, "file_dir": Path(_FOLDERS.name) / uuid.uuid4().hex}
    service = Service(ServerSettings(port=0, **{**usual, **settings}))
    service.workers = LentWorkers(record=service.recorder.record_job)
    if engine.info is not None:
        vocabulary = Vocabulary(tokenizer, engine.info.vocab_size, service.workers)
        seeds = random.Random(service.settings.seed)
        service.serve_loaded(
            ServedModel(
                *(name, engine, vocabulary),
                defaults=defaults,
                pooling=service.settings.embedding_pooling,
                seeds=seeds,
                adapters=engine.adapters,
            )
        )
    runner = await listen(service, bind(service.settings.host, 0), None)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="-",
        max_retries=0,
        http_client=DefaultAsyncHttpxClient(verify=_certificates()),
        _strict_response_validation=True,
    )
    try:
        async with aiohttp.ClientSession() as http, client:
            stores = runner.app[RESPONSE_STORE], runner.app[STORAGE]
            yield Running(url, service, engine, *stores, http, client)
    finally:
        await service.drain.finish(service.settings.drain_seconds)
        await runner.cleanup()
        await service.models.close()


async def until(condition: Callable[[], object]) -> None:
    """Waits until ``condition`` holds, for 5 s at most."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in 5 s")


def fix_seeds(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives requests without a seed the seed 1, so that equal requests are submitted equally."""
    assert server.service.loaded is not None
    monkeypatch.setattr(server.service.loaded.seeds, "getrandbits", lambda bits: 1)
