"""Binds the application, and the metrics if they have a port of their own, to their sockets."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from functools import partial

from aiohttp import web

from chairlift.api.access import hide_bad_http
from chairlift.api.app import build_app
from chairlift.api.connection import Connection
from chairlift.api.paths import with_plain_path
from chairlift.api.scrape import metrics
from chairlift.api.service import SERVICE, Service
from chairlift.api.settings import ServerSettings

# More clients may connect in one moment than the usual 128.
BACKLOG = 1024
# What has not ended by then was told to, or is no more than a page of metrics.
SHUTDOWN_SECONDS = 1.0
LINGER_SECONDS = 10.0


async def listen(service: Service, tls: ssl.SSLContext | None = None) -> web.AppRunner:
    """Binds the service's address; ``addresses`` of the result tells a port chosen by the system.

    Raises:
        OSError: the address cannot be bound.
    """
    settings = service.settings
    hide_bad_http()
    return await _bind(build_app(service), service, settings.host, settings.port, tls)


async def listen_for_scrapes(service: Service, port: int) -> web.AppRunner:
    """Binds the address of the metrics alone.

    Raises:
        OSError: the address cannot be bound.
    """
    app = web.Application()
    app[SERVICE] = service
    app.router.add_get("/metrics", metrics)
    return await _bind(app, service, service.settings.metrics_host, port, None)


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """The server's certificate, if it has one.

    Raises:
        OSError: a file cannot be read, or does not hold what it should.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A key with a passphrase would make OpenSSL ask the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        where = certificate if key is None else f"{certificate} and {key}"
        raise OSError(f"{where}: no certificate with its key: {error.reason}") from error
    except OSError as error:
        # It does not say which of the two it was.
        missing = [path for path in (certificate, key) if path and not path.is_file()]
        raise OSError(f"{missing[0] if missing else certificate}: {error.strerror}") from error
    return context


async def _bind(
    app: web.Application, service: Service, host: str, port: int, tls: ssl.SSLContext | None
) -> web.AppRunner:
    runner = web.AppRunner(
        app,
        # A client that leaves must free its row: its handler is cancelled.
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
        access_log=None,
    )
    await runner.setup()
    assert runner.server is not None, "set up"
    runner.server.request_factory = partial(with_plain_path, runner.server.request_factory)
    try:
        await _Site(runner, service, host, port, tls).start()
    except OSError as error:
        await runner.cleanup()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    except BaseException:
        await runner.cleanup()
        raise
    return runner


def address_of(runner: web.AppRunner, tls: ssl.SSLContext | None) -> str:
    """Where it listens, as a URL."""
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if tls is None else 'https'}://{shown}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Site(web.BaseSite):
    """A TCP socket whose connections are ours."""

    def __init__(
        self,
        runner: web.AppRunner,
        service: Service,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        self._service = service
        self._host = host
        self._port = port

    @property
    def name(self) -> str:
        """Where it is."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Binds it."""
        await super().start()
        settings = self._service.settings
        loop = asyncio.get_running_loop()
        assert self._runner.server is not None, "set up before a site is made"
        connect = partial(
            Connection,
            self._runner.server,
            loop,
            settings.slow_reader_seconds,
            partial(self._service.recorder.record_rejected, "malformed"),
            access_log=None,
            # NOTE: counted from the end of the reply before, or from the beginning: a request's
            # head has to be there by then.
            keepalive_timeout=settings.idle_seconds,
            # For the rest of a body that was refused to be thrown away, so that the reply is read.
            lingering_time=min(LINGER_SECONDS, settings.body_seconds),
        )
        self._server = await loop.create_server(
            connect, self._host, self._port, ssl=self._ssl_context, backlog=self._backlog
        )
