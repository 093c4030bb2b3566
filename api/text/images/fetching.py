"""Fetches images from the hosts that the server's settings name."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import NamedTuple

import aiohttp
from yarl import URL

from chairlift.api.text.images.addresses import PrivateAddress, PublicResolver, is_public

# Time for one image, with all redirects.
SECONDS = 10.0
MAX_REDIRECTS = 3
MAX_BYTES = 20 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 64 << 10


class Fetched(NamedTuple):
    """A file, and its type; None if the host gives none of an image."""

    data: bytes
    media_type: str | None


async def fetch(url: str, domains: Collection[str]) -> Fetched:
    """Fetches a file over HTTP or HTTPS.

    Args:
        domains: the hosts that it may come from, and that redirects may lead to.

    Raises:
        ValueError: another host, an address that is not public, a file that is too large, too slow,
            or not there. Nothing was fetched from such a host.
    """
    try:
        async with asyncio.timeout(SECONDS):
            return await _fetch(_parsed(url), domains)
    except TimeoutError:
        raise ValueError(f"fetching it takes longer than {SECONDS:g} s") from None
    except PrivateAddress as error:
        raise ValueError(str(error)) from None
    except (aiohttp.ClientError, OSError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, PrivateAddress) else error
        if isinstance(cause, PrivateAddress):
            raise ValueError(str(cause)) from None
        raise ValueError(f"it cannot be fetched: {type(error).__name__}") from error


async def _fetch(url: URL, domains: Collection[str]) -> Fetched:
    # NOTE: no proxies and no cookies. A body stays as it is sent, so that it cannot grow.
    connector = aiohttp.TCPConnector(resolver=PublicResolver(), use_dns_cache=False)
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        headers={"Accept": "image/*", "Accept-Encoding": "identity"},
    ) as session:
        for _ in range(MAX_REDIRECTS + 1):
            _check(url, domains)
            async with session.get(url, allow_redirects=False) as reply:
                if reply.status in _REDIRECTS:
                    url = url.join(_parsed(reply.headers.get("Location", "")))
                    continue
                if reply.status != 200:
                    raise ValueError(f"it cannot be fetched: its host replies {reply.status}")
                kind = reply.content_type
                media_type = kind if kind.startswith("image/") else None
                return Fetched(await _body(reply), media_type)
    raise ValueError(f"it cannot be fetched: more than {MAX_REDIRECTS} redirects")


def _parsed(text: str) -> URL:
    try:
        return URL(text)
    except Exception as error:  # some texts break yarl's parser in other ways than a ValueError
        raise ValueError("it cannot be fetched: its URL is invalid") from error


def _check(url: URL, domains: Collection[str]) -> None:
    host = (url.host or "").lower().rstrip(".")
    if url.scheme not in ("http", "https") or host not in domains:
        raise ValueError(f"the server does not fetch images from {host[:100] or 'there'!r}")
    if url.user is not None or url.password is not None:
        raise ValueError("its URL must not contain a user")
    # A connector does not resolve addresses.
    if _is_address(host) and not is_public(host):
        raise PrivateAddress(f"{host[:100]} is not public")


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in reply.content.iter_chunked(_CHUNK):
        body += chunk
        if len(body) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return bytes(body)
