"""The real application around a pool of models with scripted engines and slow loads."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from support.api.api_server import TOKENIZER, LentWorkers, engine_replying
from support.api.fake_engine import FakeEngine

from chairlift.api.models.entry import ModelEntry, ModelPlan
from chairlift.api.models.pool import ModelPool
from chairlift.api.models.served_model import ServedModel
from chairlift.api.server.listen import listen
from chairlift.api.server.sockets import bind
from chairlift.api.service import Service
from chairlift.api.settings import ServerSettings
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.errors import ModelError
from chairlift.engine.messages import OnProgress
from chairlift.engine.workers.pool import Workers


@dataclass
class ScriptedLoader:
    """Loads an engine that replies with the model's name, in ``seconds``.

    Attributes:
        gate: while it is cleared, loads do not end.
        error: if set, loads fail with it.
        engine: the engine of the last load.
    """

    name: str
    workers: Workers
    seconds: float = 0.0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None
    engine: FakeEngine | None = None

    async def load(self, on_progress: OnProgress) -> ServedModel:
        await asyncio.sleep(self.seconds)
        await self.gate.wait()
        if self.error is not None:
            raise ModelError(self.error)
        self.engine = engine_replying(f"I am {self.name}")
        assert self.engine.info is not None
        vocabulary = Vocabulary(TOKENIZER, self.engine.info.vocab_size, self.workers)
        return ServedModel(self.name, self.engine, vocabulary)

    async def unload(self, model: ServedModel) -> None:
        await model.client.stop()


@dataclass
class PoolServer:
    """A server on the loopback, and its parts."""

    url: str
    service: Service
    loaders: dict[str, ScriptedLoader]
    http: aiohttp.ClientSession

    def entry(self, name: str) -> ModelEntry:
        return self.service.models.find(name)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.service.recorder.registry.get_sample_value(name, labels)

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def pool_server(
    plans: Sequence[ModelPlan], budget: int | None = None, **settings: Any
) -> AsyncIterator[PoolServer]:
    """Serves models whose loads take no time, until a test says otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        usual = {"drain_seconds": 1.0, "file_dir": Path(folder) / "files", "port": 0}
        service = Service(ServerSettings(**{**usual, **settings}))
        service.workers = LentWorkers(record=service.recorder.record_job)
        loaders = {plan.name: ScriptedLoader(plan.name, service.workers) for plan in plans}
        for loader in loaders.values():
            loader.gate.set()
        entries = [ModelEntry(plan, loaders[plan.name]) for plan in plans]
        service.serve(ModelPool(entries, budget, service))
        service.models.begin()
        await service.models.start()
        runner = await listen(service, bind("127.0.0.1", 0), None)
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with aiohttp.ClientSession() as http:
                yield PoolServer(url, service, loaders, http)
        finally:
            await service.drain.finish(1.0)
            await runner.cleanup()
            await service.models.close()
