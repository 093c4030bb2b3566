"""The header Expect: a client that sends ``100-continue`` waits before it sends a large body.

NOTE: aiohttp answers it before the request is checked, even if the request is then refused, and
refuses other expectations as text/plain. So the header is kept from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

# What the client expects; absent once ``invite_body`` has answered.
EXPECTED: web.RequestKey[str] = web.RequestKey("expected", str)
_CONTINUE = "100-continue"


def with_expectation(
    make: Callable[..., web.BaseRequest], message: RawRequestMessage, *rest: Any
) -> web.BaseRequest:
    """Calls ``make`` with the message, without its header Expect, and ``rest``."""
    expected = message.headers.get(hdrs.EXPECT)
    if not expected:
        return make(message, *rest)
    headers = CIMultiDict(message.headers)
    del headers[hdrs.EXPECT]
    request = make(message._replace(headers=CIMultiDictProxy(headers)), *rest)
    # A server must not answer an expectation of HTTP/1.0.
    if message.version >= HttpVersion11:
        request[EXPECTED] = expected
    return request


def check_expectation(request: web.Request) -> None:
    """Raises HTTPExpectationFailed if the client expects anything but an invitation."""
    if request.get(EXPECTED, _CONTINUE).lower() != _CONTINUE:
        raise web.HTTPExpectationFailed


async def invite_body(request: web.Request) -> None:
    """Tells a client that waits to send the body."""
    if EXPECTED in request:
        del request[EXPECTED]
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The reply has not begun.
        request.writer.output_size = 0
