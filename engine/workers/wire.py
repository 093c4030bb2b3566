"""Messages on a pipe: 8 bytes with the length, then that many bytes."""

from __future__ import annotations

import struct
from typing import IO

_LENGTH = struct.Struct(">Q")


def send(stream: IO[bytes], data: bytes) -> None:
    """Writes one message.

    Raises:
        BrokenPipeError: the reader has closed the stream.
    """
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Reads one message; None if the stream has ended, even if within a message."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None
