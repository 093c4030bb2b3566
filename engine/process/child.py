"""One engine process, from its start to its end, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from chairlift.engine.messages import FromEngine, Shutdown, ToEngine
from chairlift.engine.process.blackbox import BlackBoxReader
from chairlift.engine.process.engine_process import Start, encode_path
from chairlift.engine.process.folder import BLACK_BOX, SOCKET, EngineFolder

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
# How long what a process sent last, an explanation perhaps, may be on its way.
LAST_WORDS_SECONDS = 0.1
# Weights and KV buffers in huge pages, where glibc computes on them: 3 % more tokens a second.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class EngineProcess:
    """Started by ``spawn``; ``close`` must follow.

    Raises:
        OSError: there is no place for its socket.
    """

    def __init__(self, receive: Callable[[FromEngine], None]) -> None:
        self._receive = receive
        with contextlib.ExitStack() as stack:
            self._folder = EngineFolder()
            stack.callback(self._folder.close)
            self._black_box = BlackBoxReader(self._folder.path / BLACK_BOX)
            stack.callback(self._black_box.close)
            try:
                self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
                stack.callback(self._socket.close, linger=0)
                self._socket.bind(f"ipc://{self._folder.path / SOCKET}")
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"{self._folder.path}: {error.strerror}") from error
            self._resources = stack.pop_all()
        self._encoder = msgspec.msgpack.Encoder()
        self._listener = asyncio.create_task(self._listen())
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, once spawned."""
        return self._process.pid if self._process else None

    @property
    def computing(self) -> dict[str, float]:
        """See ``BlackBoxReader.computing``."""
        return self._black_box.computing

    async def spawn(self, start: Start) -> None:
        """Starts the process. On Linux it ends with the calling thread, which is that of the event
        loop; see ``lifeline``.

        Raises:
            OSError: the system does not let it.
        """
        # A session of its own keeps the terminal's Ctrl-C from the engine: the server ends it.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "chairlift.engine",
            str(os.getpid()),
            str(self._folder.path),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=ENVIRONMENT | os.environ,
        )
        # Not awaited: a process that ends before it connects never takes it.
        self._socket.send(msgspec.msgpack.encode(start, enc_hook=encode_path))

    def send(self, message: ToEngine) -> None:
        """Hands it a message; never waits."""
        # The queue to a local process has no bound worth blocking for.
        self._socket.send(self._encoder.encode(message))

    async def ended(self) -> int:
        """Waits until the process has ended; its exit code, or a signal's number as a negative."""
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        return code

    def kill(self) -> None:
        """Ends the process at once, stopped or not."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Asks the process to end, and makes it if it takes too long."""
        if self._process is None:
            return
        self.send(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        self.kill()
        await self._process.wait()

    def close(self) -> None:
        """Frees the socket and the folder of a process that has ended."""
        self._listener.cancel()
        self._resources.close()

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        while True:
            self._receive(decoder.decode(await self._socket.recv()))
