"""Reads the multipart body of POST /v1/files into a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from aiohttp import BodyPartReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from chairlift.api.errors import FileTooLarge, StorageUnavailable
from chairlift.api.http.encodings import require_known_encoding
from chairlift.api.http.expectations import invite_body
from chairlift.engine.errors import RequestError

# Without ``expires_after``, OpenAI keeps files of this purpose for 30 days, too.
DEFAULT_SECONDS = 30 * 86400
MIN_SECONDS = 3600
PURPOSE = "batch"
# A thread writes this many bytes at once; they must arrive within the time limit of a body.
PIECE_BYTES = 1 << 20
_MAX_FIELD_BYTES = 1024
_MAX_FIELDS = 16
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")

P = ParamSpec("P")
T = TypeVar("T")


class Upload(NamedTuple):
    """An uploaded file: its name, and the seconds for which it is kept."""

    filename: str
    seconds: int


async def receive(request: web.Request, path: Path, max_bytes: int, seconds: float) -> Upload:
    """Writes the uploaded file to ``path``.

    Args:
        request: the request with the multipart body.
        path: a file that does not exist yet.
        max_bytes: the maximum size of the file.
        seconds: the time for each piece of it.

    Raises:
        RequestError: the body is no upload, its encoding unknown, or a field's value invalid.
        FileTooLarge: the file is larger than ``max_bytes``.
        StorageUnavailable: the disk is full or fails.
        web.HTTPException: the body is too slow or of another type.
    """
    if request.content_type != "multipart/form-data":
        raise RequestError("the body must be multipart/form-data, with purpose and file")
    require_known_encoding(request)
    await invite_body(request)
    fields: dict[str, str] = {}
    filename: str | None = None
    try:
        reader = await request.multipart()
        for _ in range(_MAX_FIELDS):
            async with asyncio.timeout(seconds):
                part = await reader.next()
            if part is None:
                break
            if not isinstance(part, BodyPartReader):
                raise RequestError("the parts of the body must not be multipart themselves")
            if part.name == "file" and filename is None:
                filename = _plain(part.filename or "file")
                await _write(part, path, max_bytes, seconds)
            elif part.name in _FIELDS:
                async with asyncio.timeout(seconds):
                    fields[part.name] = await _text_of(part)
            else:
                raise RequestError(f"unknown field {_plain(part.name or '')[:64]!r}")
        else:
            raise RequestError(f"the body may have {_MAX_FIELDS} fields")
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    except HttpProcessingError as error:
        raise _invalid(error.message) from error
    except (ValueError, web.RequestPayloadError) as error:
        raise _invalid(str(error)) from error
    return _checked(fields, filename)


def _invalid(cause: str) -> RequestError:
    line = " ".join(_plain(cause).split())[:200]
    return RequestError(f"the body is no valid multipart/form-data: {line}")


def _checked(fields: dict[str, str], filename: str | None) -> Upload:
    if filename is None:
        raise RequestError("file: is missing", "file")
    if (purpose := fields.get("purpose")) is None:
        raise RequestError("purpose: is missing", "purpose")
    if purpose != PURPOSE:
        raise RequestError(f"purpose: only {PURPOSE} is supported, not {purpose[:64]!r}", "purpose")
    if (anchor := fields.get("expires_after[anchor]", "created_at")) != "created_at":
        raise RequestError(f"expires_after.anchor: {anchor[:64]!r} is not created_at")
    text = fields.get("expires_after[seconds]", str(DEFAULT_SECONDS))
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    if not (is_number and MIN_SECONDS <= int(text) <= DEFAULT_SECONDS):
        raise RequestError(
            f"expires_after.seconds: must be a whole number from {MIN_SECONDS} to {DEFAULT_SECONDS}"
        )
    return Upload(filename, int(text))


async def _write(part: BodyPartReader, path: Path, max_bytes: int, seconds: float) -> None:
    if part.headers.get(hdrs.CONTENT_TRANSFER_ENCODING, "binary").lower() not in ("binary", "8bit"):
        raise RequestError("file: a transfer encoding is not supported", "file")
    file = await _on_disk(path.open, "xb")
    try:
        size = 0
        async for piece in _pieces(part, seconds):
            size += len(piece)
            if size > max_bytes:
                raise FileTooLarge(f"a file may have {max_bytes} bytes", "file")
            await _on_disk(file.write, piece)
    finally:
        await _on_disk(file.close)


async def _on_disk(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls ``work`` in a thread.

    Raises:
        StorageUnavailable: the disk is full or fails.
    """
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        raise StorageUnavailable(f"the file cannot be written: {error.strerror}") from error


async def _pieces(part: BodyPartReader, seconds: float) -> AsyncIterator[bytes]:
    """The content of a part in pieces; each must arrive within ``seconds``."""
    piece = bytearray()
    is_done = False
    while not is_done:
        async with asyncio.timeout(seconds):
            while len(piece) < PIECE_BYTES and not is_done:
                chunk = await part.read_chunk()
                piece += chunk
                is_done = not chunk
        if piece:
            yield bytes(piece)
            piece.clear()


async def _text_of(part: BodyPartReader) -> str:
    text = bytearray()
    while chunk := await part.read_chunk():
        text += chunk
        if len(text) > _MAX_FIELD_BYTES:
            raise RequestError(f"{part.name}: may have {_MAX_FIELD_BYTES} bytes", part.name)
    return text.decode("utf-8", "replace").strip()


def _plain(text: str) -> str:
    """The text without characters that JSON cannot hold."""
    return text.encode("utf-8", "replace").decode()
