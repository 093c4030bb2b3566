"""The engine process: ``python -m chairlift.engine PARENT FOLDER``, started by ``ProcessClient``.

PARENT is the process id of the server. FOLDER contains the server's socket and the ``blackbox``.
The first message is a ``Start``. The process ends at a ``Shutdown``, or when its parent ends: then
the kernel ends it (``lifeline``), or it notices that its standard input is closed.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from chairlift.engine.config import EngineConfig, cache_dir
from chairlift.engine.cpu.blas import load_fast_blas
from chairlift.engine.cpu.kernel_folder import lock_kernel_folder
from chairlift.engine.device.backend import BackendError
from chairlift.engine.device.open_files import import_mlx_lm
from chairlift.engine.errors import EngineDead
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.setup import LogFormat, set_up_logs
from chairlift.engine.messages import FromEngine, ModelInfo, ToEngine
from chairlift.engine.process.blackbox import BlackBox
from chairlift.engine.process.diagnosis import speed_advice
from chairlift.engine.process.folder import BLACK_BOX, SOCKET, remove


class Start(msgspec.Struct, frozen=True):
    """The first message: the model to serve, and the settings."""

    config: EngineConfig
    source: ModelSource
    log_level: str = "info"
    log_format: LogFormat = "text"


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


def encode_path(value: object) -> str:
    """Encodes a path as text, for msgspec."""
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def decode_path(kind: type, value: object) -> object:
    """Decodes a path from text, for msgspec."""
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)


def main(folder: Path, warning: str | None) -> None:
    """Connects to the parent and serves until a ``Shutdown``. ``warning`` is logged."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(f"ipc://{folder / SOCKET}")
    black_box = BlackBox(folder / BLACK_BOX)
    start = msgspec.msgpack.decode(socket.recv(), type=Start, dec_hook=decode_path)
    # Both files are open now, and are never opened by name again.
    remove(folder)
    set_up_logs(start.log_level, start.log_format, "engine")
    if warning is not None:
        logging.getLogger(__name__).warning(warning)
    blas = load_fast_blas()
    if blas.warning:
        logging.getLogger(__name__).warning(blas.warning)
    kernels = lock_kernel_folder(cache_dir() / "kernels")
    try:
        import_mlx_lm()
    except BackendError as error:
        logging.getLogger(__name__).critical("%s", error)
        sys.exit(1)
    # This import loads MLX, so it comes after the BLAS.
    from chairlift.engine.core.loop import run

    # Imported modules stay forever. Unfrozen, a full collection would visit them and delay a step
    # by tens of milliseconds.
    gc.freeze()
    encoder = msgspec.msgpack.Encoder()

    def send(message: FromEngine) -> None:
        if isinstance(message, ModelInfo):
            message = msgspec.structs.replace(message, advice=speed_advice(blas))
            if kernels is not None:
                kernels.record()
        socket.send(encoder.encode(message))

    try:
        run(start.config, start.source, SocketInbox(socket), send, black_box.note)
    except EngineDead:
        sys.exit(1)
    socket.close(linger=1000)


def _end_with_parent(folder: Path) -> None:
    # NOTE: do not use sys.stdin: the interpreter aborts at exit if a thread still reads from it.
    while os.read(0, 1):
        pass
    remove(folder)
    os._exit(0)
