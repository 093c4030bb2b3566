"""Serves the application on its sockets, and the metrics if they have a separate port."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
import ssl
import sys
from functools import partial

from aiohttp import web

from chairlift.api.http.encodings import with_decoded_body
from chairlift.api.http.expectations import with_expectation
from chairlift.api.observe.access import hide_bad_http
from chairlift.api.server.app import build_app
from chairlift.api.server.connection import Connection
from chairlift.api.server.paths import with_plain_path
from chairlift.api.server.sockets import Binding
from chairlift.api.server.status import metrics
from chairlift.api.service import SERVICE, Service

# Allows more simultaneous connection attempts than the usual 128.
BACKLOG = 1024
# Draining has ended all requests that do work before this time begins.
SHUTDOWN_SECONDS = 1.0
LINGER_SECONDS = 10.0
# Time limit of the TLS handshake; a connection already uses a file during it.
HANDSHAKE_SECONDS = 10.0

# Files reserved for restarting the engine process (a folder, its black box, the socket, pipes), for
# worker processes, and for reloading keys and certificates.
RESERVED = 32
# Further ones for each further engine: a lazy one starts when connections may use all others.
RESERVED_PER_ENGINE = 16


async def listen(service: Service, binding: Binding, tls: ssl.SSLContext | None) -> web.AppRunner:
    """Serves the application on the sockets of ``binding``.

    Raises:
        OSError: they cannot listen.
    """
    hide_bad_http()
    return await _serve(build_app(service), service, binding, tls)


async def listen_for_scrapes(service: Service, binding: Binding) -> web.AppRunner:
    """Serves only the metrics.

    Raises:
        OSError: the sockets cannot listen.
    """
    app = web.Application()
    app[SERVICE] = service
    app.router.add_get("/metrics", metrics)
    return await _serve(app, service, binding, None)


async def _serve(
    app: web.Application, service: Service, binding: Binding, tls: ssl.SSLContext | None
) -> web.AppRunner:
    runner = web.AppRunner(
        app,
        # Cancel the handler of a client that leaves, so that its row becomes free.
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
        access_log=None,
    )
    await runner.setup()
    assert runner.server is not None, "set up"
    for change in (with_decoded_body, with_expectation, with_plain_path):
        runner.server.request_factory = partial(change, runner.server.request_factory)
    try:
        for bound in binding.sockets:
            await _Site(runner, service, bound, tls).start()
    except OSError as error:
        await runner.cleanup()
        raise binding.refusal(error) from error
    except BaseException:
        await runner.cleanup()
        raise
    return runner


def address_of(runner: web.AppRunner, tls: ssl.SSLContext | None) -> str:
    """The URL of the first address that ``runner`` listens on."""
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if tls is None else 'https'}://{shown}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Site(web.BaseSite):
    """A bound socket whose connections are ``Connection`` objects."""

    def __init__(
        self,
        runner: web.AppRunner,
        service: Service,
        bound: socket.socket,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        self._service = service
        self._bound = bound

    @property
    def name(self) -> str:
        """The socket's address."""
        host, port = self._bound.getsockname()[:2]
        return f"{host}:{port}"

    async def start(self) -> None:
        """Starts to listen."""
        await super().start()
        # NOTE: uvloop's create_server does not report errors of listen().
        self._bound.listen(self._backlog)
        settings = self._service.settings
        loop = asyncio.get_running_loop()
        assert self._runner.server is not None, "set up before a site is made"
        connect = partial(
            Connection,
            self._runner.server,
            loop,
            settings.slow_reader_seconds,
            first_reserved_file(self._service.engines),
            self._service.recorder.record_rejected,
            access_log=None,
            # ``with_decoded_body`` does it.
            auto_decompress=False,
            # NOTE: aiohttp counts from the end of the previous reply or from the connection's
            # start; the headers of the next request must have arrived by then.
            keepalive_timeout=settings.idle_seconds,
            # Time to discard the rest of a refused body, so that the client reads the reply.
            lingering_time=min(LINGER_SECONDS, settings.body_seconds),
        )
        self._server = await loop.create_server(
            connect,
            sock=self._bound,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if self._ssl_context else None,
        )


def first_reserved_file(engines: int) -> int:
    """The lowest file number that no client connection may use, by the current RLIMIT_NOFILE."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit - min(RESERVED + RESERVED_PER_ENGINE * (engines - 1), limit // 4)
