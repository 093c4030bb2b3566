"""Normalizes paths: extra slashes, and the ``/v1`` that some clients leave out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage

from chairlift.api.server.routes import ROUTES

_VERSION = "/v1"
_SLASHES = re.compile(r"/{2,}")
# First parts of the versioned paths. llama.cpp also serves most of them without the version.
_VERSIONED = frozenset(
    route.path.split("/")[2] for route in ROUTES if route.path.startswith(f"{_VERSION}/")
)


def plain_path(path: str) -> str:
    """The route's form of ``path``, which has no query."""
    plain = _SLASHES.sub("/", path).rstrip("/") or "/"
    return _VERSION + plain if plain.split("/")[1] in _VERSIONED else plain


def with_plain_path(
    make: Callable[..., web.BaseRequest], message: RawRequestMessage, *rest: Any
) -> web.BaseRequest:
    """Calls ``make`` with the message, its path normalized, and ``rest``."""
    path, mark, query = message.path.partition("?")
    # NOTE: a request to a proxy has a full URL here, and OPTIONS may have "*".
    if path.startswith("/") and (plain := plain_path(path)) != path:
        url = message.url.with_path(plain, encoded=True, keep_query=True)
        message = message._replace(path=f"{plain}{mark}{query}", url=url)
    return make(message, *rest)
