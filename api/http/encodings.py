"""Bodies that a client has compressed, by the header Content-Encoding or Transfer-Encoding.

NOTE: aiohttp decodes some encodings itself. It passes on bodies with unknown ones as they are, and
calls a request malformed if it lacks the decoder, so the server does without.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from aiohttp import StreamReader, hdrs, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EmptyStreamReader

from chairlift.api.errors import UnsupportedEncoding
from chairlift.engine.errors import RequestError

# The most text that is decoded at once, so that other requests need not wait for a large body.
PIECE_BYTES = 64 << 10
# The most compressed data that is decoded at once. What follows a member is copied, so it is short.
_INPUT_BYTES = 4 << 10
# A gzip body may consist of several members; a client that appends needs few.
_MAX_MEMBERS = 64
_ALIASES = {"x-gzip": "gzip"}
WRONG_BODY = "the body is cut short or wrongly encoded"
_SUPPORTED = ("gzip", "deflate")


def encoding_of(values: Iterable[str]) -> str | None:
    """The encoding that the values of Content-Encoding name; None if the body is not encoded.

    Raises:
        UnsupportedEncoding: it is not supported, or there are several.
    """
    names = [name.strip().lower() for value in values for name in value.split(",")]
    codings = [_ALIASES.get(name, name) for name in names if name not in ("", "identity")]
    if len(codings) > 1:
        raise UnsupportedEncoding(
            "the body may have one Content-Encoding: gzip, deflate or identity"
        )
    if codings and codings[0] not in _SUPPORTED:
        raise UnsupportedEncoding(
            f"the Content-Encoding {codings[0][:40]!r} is not supported: use gzip, deflate or "
            "identity"
        )
    return codings[0] if codings else None


def require_known_encoding(request: web.Request) -> None:
    """Checks that the request's body can be read.

    Raises:
        UnsupportedEncoding: it is compressed in a way that the server does not know.
    """
    encoding_of(request.headers.getall(hdrs.CONTENT_ENCODING, ()))


def check_transfer_coding(request: web.Request) -> None:
    """Raises HTTPNotImplemented if the client has applied another transfer coding than chunked.

    NOTE: aiohttp decodes chunked and passes on what is inside. It refuses a request whose last
    coding is another one as malformed: where such a request ends is unknown.
    """
    values = request.headers.getall(hdrs.TRANSFER_ENCODING, ())
    names = [name.strip().lower() for value in values for name in value.split(",")]
    if any(name not in ("", "chunked") for name in names):
        raise web.HTTPNotImplemented


def with_decoded_body(
    make: Callable[..., web.BaseRequest],
    message: RawRequestMessage,
    payload: StreamReader,
    *rest: Any,
) -> web.BaseRequest:
    """Calls ``make`` with the message, its body as it is decoded, and ``rest``."""
    # NOTE: aiohttp also makes requests for malformed HTTP, which have no body and no real headers.
    if not isinstance(payload, EmptyStreamReader):
        # The handler refuses an unknown encoding, if it reads the body.
        with suppress(UnsupportedEncoding):
            if encoding := encoding_of(message.headers.getall(hdrs.CONTENT_ENCODING, ())):
                payload = _DecodedStream(payload, encoding)
    return make(message, payload, *rest)


async def decoded(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decodes a whole body, compressed as ``encoding`` says.

    Raises:
        web.HTTPRequestEntityTooLarge: the text is larger than ``max_bytes``.
        RequestError: the body is cut short or wrongly encoded.
    """
    text = bytearray()
    inflater = _Inflater(encoding)
    try:
        for piece in inflater.pieces(body):
            text += piece
            if len(text) > max_bytes:
                raise web.HTTPRequestEntityTooLarge(max_bytes, len(text))
            await asyncio.sleep(0)
        inflater.finish()
    except zlib.error as error:
        raise RequestError(WRONG_BODY) from error
    return bytes(text)


class _Inflater:
    """Decodes ``encoding``: gzip or deflate."""

    def __init__(self, encoding: str) -> None:
        self._is_gzip = encoding == "gzip"
        self._member: Any = None
        self._num_members = 0

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields what ``data`` adds to the text, in pieces of at most ``PIECE_BYTES``.

        Raises:
            zlib.error: the data is wrongly encoded.
        """
        view = memoryview(data)
        start = 0
        while start < len(view):
            if self._member is None:
                self._begin(view[start])
            block = view[start : start + _INPUT_BYTES]
            start += len(block)
            piece = self._member.decompress(block, PIECE_BYTES)
            yield piece
            # Zlib may hold back text although it has read all of the block.
            while not self._member.eof and (
                self._member.unconsumed_tail or len(piece) == PIECE_BYTES
            ):
                piece = self._member.decompress(self._member.unconsumed_tail, PIECE_BYTES)
                yield piece
            if self._member.eof:
                start -= len(self._member.unused_data)
                self._member = None

    def finish(self) -> None:
        """Checks that the data has ended where a member ends.

        Raises:
            zlib.error: it has not.
        """
        if self._member is not None:
            raise zlib.error("the data is cut short")

    def _begin(self, first: int) -> None:
        self._num_members += 1
        if self._num_members > _MAX_MEMBERS:
            raise zlib.error(f"the data has more than {_MAX_MEMBERS} members")
        if self._is_gzip:
            bits = zlib.MAX_WBITS | 16
        else:
            # It should have zlib's header, whose first byte ends in 8. Some clients leave it out.
            bits = zlib.MAX_WBITS if first & 0xF == 8 else -zlib.MAX_WBITS
        self._member = zlib.decompressobj(bits)


class _DecodedStream(StreamReader):
    """A body as it is decoded, which reads ``source`` when its own reader waits for more."""

    def __init__(self, source: StreamReader, encoding: str) -> None:
        loop = asyncio.get_running_loop()
        # NOTE: not the connection's protocol, whose flow belongs to ``source``. A piece is smaller
        # than the size from which a stream asks its protocol to pause.
        super().__init__(BaseProtocol(loop), PIECE_BYTES, loop=loop)
        self._source = source
        self._inflater = _Inflater(encoding)
        self._pieces: Iterator[bytes] = iter(())

    async def _wait(self, func_name: str) -> None:
        try:
            while (piece := next(self._pieces, None)) is None:
                data = await self._source.readany()
                if not data:
                    self._inflater.finish()
                    self.feed_eof()
                    return
                self._pieces = self._inflater.pieces(data)
        except zlib.error as error:
            raise web.RequestPayloadError(str(error)) from error
        self.feed_data(piece)
        # Other requests go on between two pieces.
        await asyncio.sleep(0)
