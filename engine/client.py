"""The two ways to run an engine: in a process of its own, or on a thread of this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable

import msgspec
import zmq
import zmq.asyncio

from chairlift.engine.blas import load_fast_blas
from chairlift.engine.config import EngineConfig
from chairlift.engine.logs import LogFormat
from chairlift.engine.messages import FromEngine, ModelInfo, Shutdown, ToEngine
from chairlift.engine.process import Start, encode_path
from chairlift.engine.source import ModelSource
from chairlift.engine.streams import StreamingClient

STOP_SECONDS = 10.0
# Weights and KV buffers in huge pages, where glibc computes on them: 3 % more tokens a second.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def _silent(text: str) -> None:
    """Progress that nobody asked for."""


class ProcessClient(StreamingClient):
    """An engine in its own process: it can be killed, or crash, without this one."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        log_level: str = "info",
        log_format: LogFormat = "text",
    ) -> None:
        super().__init__()
        self._start = Start(config, source, log_level, log_format)
        self._encoder = msgspec.msgpack.Encoder()
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._listener: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id, once started."""
        return self._process.pid if self._process else None

    async def start(self, on_progress: Callable[[str], None] = _silent) -> ModelInfo:
        """See ``interface.EngineClient.start``."""
        started = self.begin(on_progress)
        folder = tempfile.TemporaryDirectory(prefix="chairlift-")
        address = f"ipc://{folder.name}/engine"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.bind(address)
        # A session of its own keeps the terminal's Ctrl-C from the engine: the server ends it.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "chairlift.engine.process",
            address,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=ENVIRONMENT | os.environ,
        )
        self._listener = asyncio.create_task(self._listen(self._socket))
        self._watcher = asyncio.create_task(self._watch(self._process, folder))
        # Not awaited: a process that ends before it connects never takes it.
        self._socket.send(msgspec.msgpack.encode(self._start, enc_hook=encode_path))
        return await started

    def send(self, message: ToEngine) -> None:
        """See ``StreamingClient.send``."""
        if self._socket is not None and not self._socket.closed:
            # Never waits: the queue to a local process has no bound worth blocking for.
            self._socket.send(self._encoder.encode(message))

    async def stop(self) -> None:
        """See ``interface.EngineClient.stop``."""
        if self._process is None or self._socket is None:
            return
        self.send(Shutdown())
        if self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._watcher is not None:
            await self._watcher
        if self._listener is not None:
            self._listener.cancel()
        self._socket.close(linger=0)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        while True:
            self.receive(decoder.decode(await socket.recv()))

    async def _watch(
        self, process: asyncio.subprocess.Process, folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        code = await process.wait()
        # What it sent last, an explanation perhaps, may still be on its way.
        await asyncio.sleep(0.1)
        folder.cleanup()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self.end(f"the engine process ended with {how}")


class LocalClient(StreamingClient):
    """An engine on a thread of this process, for tests and for embedding."""

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        super().__init__()
        self._config = config
        self._source = source
        self._inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self, on_progress: Callable[[str], None] = _silent) -> ModelInfo:
        """See ``interface.EngineClient.start``."""
        started = self.begin(on_progress)
        loop = asyncio.get_running_loop()

        def deliver(message: FromEngine) -> None:
            loop.call_soon_threadsafe(self.receive, message)

        def work() -> None:
            why = "it was stopped"
            try:
                self._run(deliver)
            except Exception as error:  # whatever it is, those who wait must learn of it
                why = f"{type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # the loop has ended first
                loop.call_soon_threadsafe(self.end, why)

        self._thread = threading.Thread(target=work, name="chairlift-engine", daemon=True)
        self._thread.start()
        return await started

    def send(self, message: ToEngine) -> None:
        """See ``StreamingClient.send``."""
        self._inbox.put(message)

    async def stop(self) -> None:
        """See ``interface.EngineClient.stop``."""
        if self._thread is not None:
            self.send(Shutdown())
            await asyncio.to_thread(self._thread.join)

    def _run(self, deliver: Callable[[FromEngine], None]) -> None:
        if "mlx.core" not in sys.modules:
            load_fast_blas()
        from chairlift.engine.loop import run

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
