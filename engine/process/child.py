"""One engine process, from its start to its end, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping

import msgspec
import zmq
import zmq.asyncio

from chairlift.engine.config import encode_path
from chairlift.engine.device.openmp import remove_abandoned_registrations
from chairlift.engine.messages import FromEngine, Shutdown, ToEngine
from chairlift.engine.process.blackbox import BlackBoxReader
from chairlift.engine.process.engine_process import Start
from chairlift.engine.process.folder import BLACK_BOX, SOCKET, EngineFolder

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
# Time for the last messages of a process that has ended, such as an explanation, to arrive.
LAST_WORDS_SECONDS = 0.1
# glibc allocates weights and KV buffers in huge pages: 10 to 20 % more tokens a second on the CPU.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class EngineProcess:
    """An engine process and the socket to it. ``spawn`` starts it; ``close`` must follow.

    Args:
        receive: called with each message from the engine.

    Raises:
        OSError: its socket cannot be made.
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
        """The process id; None before ``spawn``."""
        return self._process.pid if self._process else None

    @property
    def computing(self) -> dict[str, float]:
        """See ``BlackBoxReader.computing``."""
        return self._black_box.computing

    async def spawn(self, start: Start, environment: Mapping[str, str]) -> None:
        """Starts the process. On Linux it ends with the calling thread; see ``workers.lifeline``.

        Call it on the event loop's thread, which lives as long as the server.

        Args:
            environment: variables in addition to those of this process.

        Raises:
            OSError: the system cannot start it.
            UnicodeEncodeError: a path or name in ``start`` is not UTF-8.
        """
        message = msgspec.msgpack.encode(start, enc_hook=encode_path)
        # In a new session the engine does not get the terminal's Ctrl-C: the server ends it.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "chairlift.engine",
            str(os.getpid()),
            str(self._folder.path),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**ENVIRONMENT, **os.environ, **environment},
        )
        # Not awaited: a process that ends before it connects would never receive it.
        self._socket.send(message)

    def send(self, message: ToEngine) -> None:
        """Sends a message without waiting."""
        # Not awaited: the queue to a local process is practically unbounded.
        self._socket.send(self._encoder.encode(message))

    async def ended(self) -> int:
        """Waits until the process has ended.

        Returns:
            Its exit code, or the negative number of the signal that ended it.
        """
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        return code

    def kill(self) -> None:
        """Ends the process at once, even if it is stopped."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Asks the process to end, and kills it if that takes longer than STOP_SECONDS."""
        if self._process is None:
            return
        self.send(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        self.kill()
        await self._process.wait()

    def close(self) -> None:
        """Releases the socket and the folder of a process that has ended."""
        # That of the process, and those of the further ranks that it has started.
        remove_abandoned_registrations()
        self._listener.cancel()
        self._resources.close()

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        while True:
            self._receive(decoder.decode(await self._socket.recv()))
