"""TLS, cross-origin requests, a separate port for metrics, loopback addresses."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest
import trustme
from support.api.api_server import CHAT, engine_replying, running
from support.api.credentials import BOB, alice_and_bob, bearer

from chairlift.api.server.listen import is_loopback, listen, listen_for_scrapes
from chairlift.api.server.sockets import bind
from chairlift.api.server.tls import Certificate
from chairlift.api.service import Service
from chairlift.api.settings import ServerSettings


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    for part in issued.cert_chain_pems:
        part.write_to_path(certificate, append=True)
    settings = ServerSettings(port=0, ssl_certfile=certificate, ssl_keyfile=key)
    tls = Certificate.from_settings(settings)
    assert tls is not None
    runner = await listen(Service(settings), bind("127.0.0.1", 0), tls.context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    try:
        url = f"https://127.0.0.1:{runner.addresses[0][1]}/version"
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trusting) as response:
            assert response.status == 200
    finally:
        await runner.cleanup()
    for settings, named in (
        (ServerSettings(ssl_certfile=tmp_path / "none.pem"), "none.pem: No such file"),
        (ServerSettings(ssl_certfile=key, ssl_keyfile=key), "no certificate with its key"),
        (ServerSettings(ssl_certfile=certificate), "no certificate with its key"),
    ):
        with pytest.raises(OSError, match=named):
            Certificate.from_settings(settings)


async def test_only_named_origins_may_call_from_web_pages() -> None:
    ours, other = "https://ours.example", "https://other.example"
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"}
    url = "/v1/chat/completions"
    async with running(
        engine_replying("Hello"), cors_origins=(ours,), keys=alice_and_bob()
    ) as server:

        async def options(origin: str) -> aiohttp.ClientResponse:
            headers = {"Origin": origin, **ask}
            async with server.http.options(server.url + url, headers=headers) as response:
                return response

        preflight = await options(ours)
        assert preflight.status == 204
        assert preflight.headers["Access-Control-Allow-Origin"] == ours
        assert preflight.headers["Access-Control-Allow-Headers"] == "x-api-key"
        refused = await options(other)
        assert refused.status == 401
        assert "Access-Control-Allow-Origin" not in refused.headers
        headers = {"Origin": ours, **bearer(BOB)}
        async with server.http.post(
            server.url + url, json={**CHAT, "stream": True}, headers=headers
        ) as response:
            assert response.headers["Access-Control-Allow-Origin"] == ours
            exposed = response.headers["Access-Control-Expose-Headers"].split(", ")
            assert {"X-Request-Id", "request-id", "Retry-After"} <= set(exposed)
            assert response.headers["Vary"] == "Origin"
    async with (
        running(engine_replying("Hello")) as server,
        server.http.options(server.url + url, headers={"Origin": ours, **ask}) as response,
    ):
        assert response.status == 405
        assert not [name for name in response.headers if "access-control" in name.lower()]


async def test_pages_of_other_origins_cannot_send_what_browsers_do_not_ask_for() -> None:
    ours, other = "https://ours.example", "https://other.example"
    unload = "/v1/models/org/tiny/unload"

    def upload() -> aiohttp.FormData:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"{}", filename="in.jsonl")
        return form

    async with running(engine_replying("Hello"), cors_origins=(ours,)) as server:

        async def status(path: str, data: object = None, **headers: str) -> int:
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            async with server.http.post(server.url + path, data=data, headers=headers) as response:
                return response.status

        assert await status("/v1/files", upload(), Origin=other) == 403
        assert await status("/v1/files", upload(), Origin="null") == 403
        assert await status("/v1/files", upload(), Origin="http://[") == 403
        assert await status(unload, Origin=other) == 403
        assert await status(unload, b"x", Origin=other, Content_Type="text/plain") == 403
        assert await status(unload, Origin=server.url, Sec_Fetch_Site="same-site") == 403
        # Not from a page, from the server's own page, directly or behind a proxy, and from ours.
        assert await status("/v1/files", upload()) == 200
        assert await status("/v1/files", upload(), Origin=server.url) == 200
        assert (
            await status("/v1/files", upload(), Origin=other, Sec_Fetch_Site="same-origin") == 200
        )
        assert await status("/v1/files", upload(), Origin=ours, Sec_Fetch_Site="cross-site") == 200
        # A browser asks before it sends JSON; other programs may have an origin, too.
        code, _ = await server.post("/v1/chat/completions", CHAT, Origin=other)
        assert code == 200
        async with server.http.get(server.url, headers={"Accept-Encoding": "gzip"}) as page:
            assert page.headers.getall("Vary") == ["Accept-Encoding", "Origin"]
    async with running(engine_replying("Hello")) as server:
        assert await status(unload, Origin=ours) == 403


async def test_metrics_on_a_separate_port() -> None:
    async with running(engine_replying("Hello"), metrics_port=0) as server:
        status, _ = await server.get("/metrics")
        assert status == 404
        scrapes = await listen_for_scrapes(server.service, bind("127.0.0.1", 0))
        try:
            address = f"http://127.0.0.1:{scrapes.addresses[0][1]}"
            async with server.http.get(f"{address}/metrics") as response:
                assert "chairlift_http_requests_total" in await response.text()
            async with server.http.get(f"{address}/v1/models") as response:
                assert response.status == 404
        finally:
            await scrapes.cleanup()


def test_loopback_addresses_are_recognized() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.5.5.5")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.5", "example.org", "")))
