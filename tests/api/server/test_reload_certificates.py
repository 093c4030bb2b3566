"""Reloading the TLS certificate: new connections get the new one, open ones go on."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from support.api.credentials import LoopbackCertificates

from chairlift.api.server.listen import listen
from chairlift.api.server.reload import Reloader
from chairlift.api.server.sockets import bind
from chairlift.api.server.tls import Certificate
from chairlift.api.service import Service
from chairlift.api.settings import ServerSettings


@asynccontextmanager
async def tls_server(
    issued: LoopbackCertificates,
) -> AsyncIterator[tuple[Reloader, int, Service]]:
    settings = ServerSettings(ssl_certfile=issued.certificate, ssl_keyfile=issued.key)
    certificate = Certificate.from_settings(settings)
    assert certificate is not None
    service = Service(settings)
    runner = await listen(service, bind("127.0.0.1", 0), certificate.context)
    reloader = Reloader(settings, service.accounts, certificate, service.recorder)
    try:
        yield reloader, runner.addresses[0][1], service
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("loop", [asyncio, uvloop], ids=["asyncio", "uvloop"])
def test_new_connections_get_the_new_certificate(
    loop: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop.run(check_certificates(tmp_path, caplog))


async def check_certificates(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    issued = LoopbackCertificates(folder)
    first = issued.write()
    async with tls_server(issued) as (reloader, port, service), aiohttp.ClientSession() as http:
        url = f"https://127.0.0.1:{port}/version"
        assert await issued.presented(port) == first
        kept = await asyncio.open_connection("127.0.0.1", port, ssl=issued.trusting)
        second = issued.write()
        assert await issued.presented(port) == first  # not reloaded yet
        await reloader.reload()
        # With and without SNI, and with TLS 1.2.
        assert await issued.presented(port) == second
        assert await issued.presented(port, server_hostname="127.0.0.1") == second
        old = ssl.create_default_context()
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        issued.trusting, newest = old, issued.trusting
        assert await issued.presented(port, server_hostname="nothing.example") == second
        issued.trusting = newest
        async with http.get(url, ssl=issued.trusting) as response:
            assert response.status == 200
        # A connection from before the reload still works.
        kept[1].write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await kept[0].readline()).startswith(b"HTTP/1.1 200")
        kept[1].close()
        good = issued.certificate.read_bytes(), issued.key.read_bytes()
        for certificate, key in (
            (b"", good[1]),
            (good[0], b""),
            (good[0][:-100], good[1]),
            (good[0], issued.other_key),
            (good[1], good[1]),
            (None, good[1]),
            (good[0], None),
        ):
            for path, content in ((issued.certificate, certificate), (issued.key, key)):
                path.unlink(missing_ok=True)
                if content is not None:
                    path.write_bytes(content)
            caplog.clear()
            await reloader.reload()
            (line,) = caplog.records
            assert line.levelname == "ERROR"
            assert "the certificate stays as it is: " in line.getMessage()
            assert str(folder) in line.getMessage()
            assert await issued.presented(port) == second
        third = issued.write()
        await reloader.reload()
        assert await issued.presented(port) == third
        failures = service.recorder.registry.get_sample_value(
            "chairlift_reloads_total", {"outcome": "failure"}
        )
        assert failures == 7
