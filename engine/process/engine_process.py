"""The engine process: ``python -m chairlift.engine PARENT FOLDER``, started by ``ProcessClient``.

PARENT is the process id of the server. FOLDER contains the server's socket and the ``blackbox``.
The first message is a ``Start``. The process ends at a ``Shutdown``, or when its parent ends: then
the kernel ends it (``workers.lifeline``), or it notices that its standard input is closed.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from chairlift.engine.config import EngineConfig, decode_path
from chairlift.engine.device.backend import BackendError
from chairlift.engine.errors import EngineDead, ModelError
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.setup import LogFormat, set_up_logs
from chairlift.engine.messages import FromEngine, ModelInfo, StartFailed, ToEngine
from chairlift.engine.parallel.followers import Followers, StartRank
from chairlift.engine.parallel.hostfile import read_hostfile
from chairlift.engine.parallel.journal import Broadcast
from chairlift.engine.parallel.place import local_places, places_of, reserve_ports
from chairlift.engine.process.blackbox import BlackBox
from chairlift.engine.process.diagnosis import speed_advice
from chairlift.engine.process.folder import BLACK_BOX, SOCKET, remove
from chairlift.engine.process.libraries import load_libraries

if TYPE_CHECKING:
    from chairlift.engine.parallel.ranks import Ranks

log = logging.getLogger(__name__)
LINGER_SECONDS = 5.0


class Start(msgspec.Struct, frozen=True):
    """The first message: the model to serve, and the settings."""

    config: EngineConfig
    source: ModelSource
    log_level: str = "info"
    log_format: LogFormat = "text"


class Leader:
    """Rank 0 of several: it starts the others and joins them.

    Args:
        on_failed: see ``Followers``.

    Raises:
        ModelError: the others cannot be started.
    """

    def __init__(self, start: Start, on_failed: Callable[[str], None]) -> None:
        config = start.config
        size = config.tensor_parallel_size
        hostfile = config.hostfile
        if hostfile:
            places = places_of(read_hostfile(hostfile, size))
        else:
            self._ports = reserve_ports(size)
            places = local_places(size, self._ports.numbers)
        self.place = places[0]
        self.followers = Followers(
            [
                StartRank(place, config, start.source, start.log_level, start.log_format)
                for place in places[1:]
            ],
            on_failed,
        )

    def join(self) -> Ranks:
        """Waits until all ranks have loaded MLX and joined each other.

        Raises:
            ModelError: a rank has failed, or has another kind of device.
        """
        from chairlift.engine.parallel.ranks import join_ranks

        return join_ranks(self.place, self.followers.meet, Broadcast(self.followers.send))


class SocketInbox:
    """Receives the parent's messages, on one thread only. Other threads wake it through a pipe."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    def receive(self, block: bool) -> Iterable[ToEngine]:
        """See ``Inbox.receive``."""
        if block:
            self._poller.poll()
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        messages: list[ToEngine] = []
        while self._socket.poll(0):
            messages.append(self._decoder.decode(self._socket.recv()))
        return messages

    def wake(self) -> None:
        """See ``Inbox.wake``."""
        with suppress(BlockingIOError):  # a full pipe wakes it as well
            os.write(self._waker, b"\0")


def main(folder: Path, warning: str | None) -> None:
    """Connects to the parent and serves until a ``Shutdown``. ``warning`` is logged."""
    # A signal such as SIGSEGV then writes the stack of Python calls to the log.
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    with connected(folder / SOCKET) as socket:
        _serve(socket, folder, warning)


@contextmanager
def connected(path: Path) -> Iterator[zmq.Socket[bytes]]:
    """A socket to the parent. Messages on their way have LINGER_SECONDS at the end of the context.

    NOTE: ZeroMQ sends in a thread of its own. The end of the process would stop that thread, so the
    context waits for it; pyzmq does not when the interpreter ends.
    """
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.connect(f"ipc://{path}")
    try:
        yield socket
    finally:
        socket.close(linger=int(LINGER_SECONDS * 1000))
        context.term()


def _serve(socket: zmq.Socket[bytes], folder: Path, warning: str | None) -> None:
    black_box = BlackBox(folder / BLACK_BOX)
    start = msgspec.msgpack.decode(socket.recv(), type=Start, dec_hook=decode_path)
    # Both files are open now, and are never opened by name again.
    remove(folder)
    set_up_logs(start.log_level, start.log_format, "engine")
    if warning is not None:
        log.warning(warning)
    encoder = msgspec.msgpack.Encoder()
    sending = threading.Lock()

    def fail(why: str) -> None:
        with sending:
            socket.send(encoder.encode(StartFailed(why)))

    try:
        leader = Leader(start, fail) if start.config.tensor_parallel_size > 1 else None
        libraries = load_libraries(leader.place if leader else None)
    except ModelError as error:
        fail(str(error))
        return
    except BackendError as error:
        log.critical("%s", error)
        sys.exit(1)
    # These imports load MLX, so they come after the BLAS.
    from chairlift.engine.core.loop import run
    from chairlift.engine.parallel.ranks import ALONE

    # Imported modules stay forever. Unfrozen, a full collection would visit them and delay a step
    # by tens of milliseconds.
    gc.freeze()
    gc.enable()

    def send(message: FromEngine) -> None:
        if leader is not None and isinstance(message, StartFailed):
            leader.followers.end_if_lost()
        libraries.record(message)
        if isinstance(message, ModelInfo):
            message = msgspec.structs.replace(message, advice=speed_advice(libraries.blas))
            if leader is not None:
                leader.followers.serve()
        with sending:
            socket.send(encoder.encode(message))

    try:
        ranks = leader.join() if leader else ALONE
        run(start.config, start.source, SocketInbox(socket), send, black_box.note, ranks)
    except ModelError as error:
        send(StartFailed(str(error)))
    except EngineDead:
        if leader is not None:
            leader.followers.end_if_lost()
        sys.exit(1)
    finally:
        if leader is not None:
            leader.followers.close()


def _end_with_parent(folder: Path) -> None:
    # NOTE: do not use sys.stdin: the interpreter aborts at exit if a thread still reads from it.
    while os.read(0, 1):
        pass
    remove(folder)
    os._exit(0)
