"""Binds the application to its socket."""

from __future__ import annotations

from aiohttp import web

from chairlift.api.access import hide_bad_http
from chairlift.api.app import build_app
from chairlift.api.service import Service

# More clients may connect in one moment than the usual 128.
BACKLOG = 1024


async def listen(service: Service) -> web.AppRunner:
    """Binds the service's address; ``addresses`` of the result tells a port chosen by the system.

    Raises:
        OSError: the address cannot be bound.
    """
    settings = service.settings
    hide_bad_http()
    runner = web.AppRunner(
        build_app(service),
        # A client that leaves must free its row: its handler is cancelled.
        handler_cancellation=True,
        # NOTE: aiohttp waits for so long twice before it cancels a handler.
        shutdown_timeout=settings.grace_seconds / 2,
        access_log=None,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, backlog=BACKLOG).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner
