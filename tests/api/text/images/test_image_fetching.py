"""Images from hosts: only from those that the settings allow, and never from inside."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.schemas.images import ImageReference
from chairlift.api.text.images import addresses, fetching
from chairlift.api.text.images.addresses import is_public
from chairlift.api.text.images.loading import ImageLoader
from chairlift.engine.errors import RequestError

HOST = "images.example.org"
PNG = b"\x89PNG not really"

PRIVATE = [
    *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.0.9", "169.254.169.254"),
    *("172.16.0.1", "192.0.0.8", "192.168.1.1", "198.18.0.1", "224.0.0.1", "240.0.0.1"),
    *("255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1"),
    *(
        "::127.0.0.1",
        "::ffff:0:127.0.0.1",
        "fec0::1",
        "5f00::1",
        "4000::1",
        "3fff::1",
        "100:0:0:1::1",
    ),
    *("2002:7f00:1::", "2002:a9fe:a9fe::", "2001:db8::1", "", "localhost", "1.2.3"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@given(st.integers(0, 2**32 - 1))
def test_an_address_inside_another_is_as_public(number: int) -> None:
    inner = ip_address(number)
    for outer in (f"::ffff:{inner}", str(ip_address((0x64FF9B << 96) | number))):
        assert is_public(outer) == is_public(str(inner))


class Hosts:
    """Names that resolve to given addresses; 127.0.0.1 counts as public for HOST only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = {HOST: ["127.0.0.1"]}
        self.asked: list[str] = []
        real = asyncio.base_events.BaseEventLoop.getaddrinfo
        hosts = self

        async def getaddrinfo(loop: Any, host: str, port: int, **fields: Any) -> Any:
            hosts.asked.append(host)
            if host not in hosts.names:
                raise socket.gaierror("unknown")
            found = []
            for address in hosts.names[host]:
                found += await real(loop, address, port, **fields)
            return found

        monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(
            addresses, "is_public", lambda address: address == "127.0.0.1" or is_public(address)
        )


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


@asynccontextmanager
async def _site(*routes: web.RouteDef) -> AsyncIterator[int]:
    """A web server on 127.0.0.1; yields its port."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _reply(body: bytes = PNG, status: int = 200, **headers: str) -> web.RouteDef:
    async def handler(request: web.Request) -> web.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, status=status, headers=given)

    return web.get("/a.png", handler)


async def _load(url: str, domains: frozenset[str] = frozenset({HOST})) -> Any:
    return await ImageLoader(domains).load([ImageReference(url)])


async def _refused(url: str, reason: str, domains: frozenset[str] = frozenset({HOST})) -> None:
    with pytest.raises(RequestError, match=reason) as error:
        await _load(url, domains)
    assert str(error.value).startswith("image 1: ")


async def test_an_allowed_host(hosts: Hosts) -> None:
    async with _site(_reply(content_type="image/png")) as port:
        (image,) = await _load(f"http://{HOST}:{port}/a.png")
        assert image == (PNG, "image/png", "auto")
        (image,) = await _load(f"HTTP://{HOST.upper()}:{port}/a.png")
        assert image.data == PNG


async def test_a_type_that_says_nothing_is_left_out(hosts: Hosts) -> None:
    async with _site(_reply(content_type="application/octet-stream")) as port:
        (image,) = await _load(f"http://{HOST}:{port}/a.png")
        assert image.media_type is None


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "other.example.org"),
        *(
            f"a.{HOST}",
            f"{HOST}.evil.org",
            f"evil.org#{HOST}",
            f"evil.org?{HOST}",
            f"{HOST}@evil.org",
        ),
        "169.254.169.254",
    ],
)
async def test_other_hosts_are_not_even_resolved(hosts: Hosts, host: str) -> None:
    await _refused(f"http://{host}/a.png", "does not fetch images from|fetched")
    assert hosts.asked == []


async def test_without_domains_nothing_is_fetched(hosts: Hosts) -> None:
    await _refused(f"http://{HOST}/a.png", "only data URLs", frozenset())
    assert hosts.asked == []


@pytest.mark.parametrize("private", [["10.0.0.1"], ["8.8.8.8", "192.168.0.1"], ["::1"]])
async def test_an_allowed_name_with_a_private_address(hosts: Hosts, private: list[str]) -> None:
    hosts.names[HOST] = private
    await _refused(f"http://{HOST}/a.png", "has an address that is not public")


@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254", "[::1]", "[fd00::1]"])
async def test_an_allowed_private_address(hosts: Hosts, address: str) -> None:
    domains = frozenset({address.strip("[]")})
    await _refused(f"http://{address}/a.png", "not public", domains)


async def test_a_url_with_a_user(hosts: Hosts) -> None:
    await _refused(f"http://me:secret@{HOST}/a.png", "must not contain a user")


def _redirect(target: str, status: int = 302) -> web.RouteDef:
    return _reply(b"", status, Location=target)


async def test_redirects_within_the_allowed_hosts(hosts: Hosts) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=PNG)

    async with _site(_redirect("/b.png", 307), web.get("/b.png", handler)) as port:
        (image,) = await _load(f"http://{HOST}:{port}/a.png")
        assert image.data == PNG


@pytest.mark.parametrize(
    "target",
    [
        *("http://127.0.0.1/x", "http://169.254.169.254/latest/meta-data", "http://[::1]/x"),
        *("//10.0.0.1/x", "http://other.example.org/x", "file:///etc/passwd", "gopher://x/", ""),
        f"ftp://{HOST}/x",
    ],
)
async def test_redirects_to_elsewhere(hosts: Hosts, target: str) -> None:
    async with _site(_redirect(target)) as port:
        await _refused(f"http://{HOST}:{port}/a.png", "does not fetch|fetched")
    assert set(hosts.asked) == {HOST}


async def test_redirects_without_end(hosts: Hosts) -> None:
    async with _site(_redirect("/a.png")) as port:
        await _refused(f"http://{HOST}:{port}/a.png", "more than 3 redirects")


@pytest.mark.parametrize("status", [201, 204, 304, 403, 404, 500])
async def test_other_statuses(hosts: Hosts, status: int) -> None:
    async with _site(_reply(b"", status)) as port:
        await _refused(f"http://{HOST}:{port}/a.png", f"replies {status}")


async def test_a_file_that_is_too_large(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_BYTES", 1000)

    async def endless(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        while True:
            await reply.write(bytes(512))

    async with _site(web.get("/a.png", endless)) as port:
        await _refused(f"http://{HOST}:{port}/a.png", "more than 1000 bytes")


async def test_a_body_is_not_decompressed(hosts: Hosts) -> None:
    async with _site(_reply(b"raw", Content_Encoding="gzip")) as port:
        (image,) = await _load(f"http://{HOST}:{port}/a.png")
        assert image.data == b"raw"


async def _waits(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(0.5)
    return web.Response()


async def _drips(request: web.Request) -> web.StreamResponse:
    """Sends a byte at a time, so that no single read takes long."""
    reply = web.StreamResponse()
    await reply.prepare(request)
    for _ in range(50):
        await reply.write(b"x")
        await asyncio.sleep(0.01)
    return reply


async def _redirects_slowly(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(0.04)
    return web.Response(status=302, headers={"Location": "/a.png"})


@pytest.mark.parametrize("handler", [_waits, _drips, _redirects_slowly])
async def test_a_host_that_is_too_slow(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, handler: Handler
) -> None:
    monkeypatch.setattr(fetching, "SECONDS", 0.1)
    async with _site(web.get("/a.png", handler)) as port:
        await _refused(f"http://{HOST}:{port}/a.png", "longer than 0.1 s")


async def test_a_name_that_resolves_to_another_address_the_next_time(hosts: Hosts) -> None:
    """The connection is made to the address that was checked, and each redirect is checked anew."""
    resolved: list[str] = []

    class Rebinding(dict[str, list[str]]):
        def __getitem__(self, name: str) -> list[str]:
            resolved.append(name)
            return ["127.0.0.1"] if len(resolved) == 1 else ["10.0.0.1"]

    hosts.names = Rebinding({HOST: []})
    async with _site(_reply()) as port:
        assert len(await _load(f"http://{HOST}:{port}/a.png")) == 1
        assert resolved == [HOST]
        await _refused(f"http://{HOST}:{port}/a.png", "not public")
    resolved.clear()
    async with _site(_redirect("/a.png")) as port:
        await _refused(f"http://{HOST}:{port}/a.png", "not public|3 redirects")


async def test_a_host_that_is_not_there(hosts: Hosts) -> None:
    del hosts.names[HOST]
    await _refused(f"http://{HOST}/a.png", "cannot be fetched")


async def test_proxies_of_the_environment_are_not_used(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with _site(_reply()) as port:
        assert len(await _load(f"http://{HOST}:{port}/a.png")) == 1


PIECES = (
    *(
        "http://",
        "//",
        "[",
        "]",
        "::1",
        "%",
        "%00",
        "@",
        ":",
        ":99999",
        ":-1",
        ":0",
        HOST,
        "..",
        "/",
    ),
    *("?", "#", "\\", "\n", "\0", " ", "é", "xn--", "xn--a", "。", "a" * 300, ".", "\ud800"),
    *("user:pw", "[::ffff:127.0.0.1]", "[fe80::1%25eth0]", "0x7f000001"),
)


async def test_any_url_is_loaded_or_refused(hosts: Hosts) -> None:
    """With no other exception, such as those of the parser of URLs."""
    hosts.names = {}
    drawn = random.Random(5)
    for _ in range(1500):
        begin = drawn.choice(("http://", "https://", "http:", f"http://{HOST}", "file:", "data:"))
        await _refused(begin + "".join(drawn.choices(PIECES, k=drawn.randrange(6))), ".{1,300}$")
    for url in ("http://[::1]@", f"http://{HOST}:{'9' * 100_000}", f"http://[{'a' * 100_000}"):
        await _refused(url, ".{1,300}$")
    assert set(hosts.asked) <= {HOST, f"{HOST}."}
