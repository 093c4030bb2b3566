"""An engine on a thread of this process, for tests and for embedding."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable

from chairlift.engine.client.base import BaseEngineClient
from chairlift.engine.config import EngineConfig
from chairlift.engine.cpu.blas import load_fast_blas
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import (
    FromEngine,
    ModelInfo,
    OnProgress,
    Shutdown,
    ToEngine,
    silent,
)


class LocalClient(BaseEngineClient):
    """An engine on a thread of this process, for tests and for embedding."""

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        super().__init__()
        self._config = config
        self._source = source
        self._inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self, on_progress: OnProgress = silent) -> ModelInfo:
        """See ``interface.EngineClient.start``."""
        started = self.begin(on_progress)
        loop = asyncio.get_running_loop()

        def deliver(message: FromEngine) -> None:
            loop.call_soon_threadsafe(self.receive, message)

        def work() -> None:
            why = "it was stopped"
            try:
                self._run(deliver)
            except Exception as error:  # any error must reach the waiting requests
                why = f"{type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # the event loop has already ended
                loop.call_soon_threadsafe(self.end, why)

        self._thread = threading.Thread(target=work, name="chairlift-engine", daemon=True)
        self._thread.start()
        return await started

    def send(self, message: ToEngine) -> None:
        """See ``BaseEngineClient.send``."""
        self._inbox.put(message)

    async def stop(self) -> None:
        """See ``interface.EngineClient.stop``."""
        if self._thread is not None:
            self.send(Shutdown())
            await asyncio.to_thread(self._thread.join)

    def _run(self, deliver: Callable[[FromEngine], None]) -> None:
        if "mlx.core" not in sys.modules:
            load_fast_blas()
        from chairlift.engine.core.loop import run

        run(self._config, self._source, _QueueInbox(self._inbox), deliver)


class _QueueInbox:
    def __init__(self, messages: queue.SimpleQueue[ToEngine | None]) -> None:
        self._messages = messages

    def receive(self, block: bool) -> Iterable[ToEngine]:
        arrived = [self._messages.get()] if block else []
        while not self._messages.empty():
            arrived.append(self._messages.get())
        return [message for message in arrived if message is not None]

    def wake(self) -> None:
        self._messages.put(None)
