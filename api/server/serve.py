"""Runs the server: listens at once, loads models in the background, returns the exit code."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import uvloop

from chairlift.api.models.engine_loader import LoaderTools
from chairlift.api.models.making import make_pool
from chairlift.api.models.spec import ModelsMemory, ModelSpec
from chairlift.api.openai.batches.storage import STORAGE
from chairlift.api.server.banner import banner_fields, banner_lines
from chairlift.api.server.listen import address_of, is_loopback, listen, listen_for_scrapes
from chairlift.api.server.reload import Reloader
from chairlift.api.server.signals import INTERRUPTED, handled
from chairlift.api.server.sockets import Sockets
from chairlift.api.server.start_progress import StartProgress
from chairlift.api.server.tls import Certificate
from chairlift.api.service import Service
from chairlift.api.settings import ServerSettings
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.errors import EngineDead, ModelError
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.logs.setup import BANNER
from chairlift.engine.messages import silent

logger = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005


def serve(server: Server) -> int:
    """Serves until SIGINT, SIGTERM or the engine's end; returns the process's exit code."""
    # A thread that renders a chat template waits this long for a busy event loop to yield.
    sys.setswitchinterval(SWITCH_SECONDS)
    exit_code = uvloop.run(server.run())
    if server.left_fetch:
        # NOTE: Python would wait for the threads of the hub's client, until the download is
        # complete. The next server continues it.
        atexit._run_exitfuncs()
        os._exit(exit_code)
    return exit_code


class Server:
    """One run of the server.

    Args:
        settings: the server's settings.
        specs: the models, at least one.
        models_memory: what all engines may use together; see ``make_pool``.
        supervision: the limits for engines that hang or fail.
        sockets: where it listens. It closes them at the end.
        certificate: for TLS.

    Attributes:
        left_fetch: it was stopped while it fetched a model, and a thread still does.
    """

    def __init__(
        self,
        settings: ServerSettings,
        specs: Sequence[ModelSpec],
        models_memory: ModelsMemory,
        supervision: Supervision,
        sockets: Sockets,
        certificate: Certificate | None = None,
    ) -> None:
        self._settings = settings
        self._specs = specs
        self._models_memory = models_memory
        self._supervision = supervision
        self._sockets = sockets
        self._certificate = certificate
        self.left_fetch = False
        self._service = Service(settings, len(specs))
        self._progress = StartProgress(self._service)
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serves; returns the exit code."""
        service = self._service
        reloader = Reloader(self._settings, service.accounts, self._certificate, service.recorder)
        async with AsyncExitStack() as stack:
            stack.enter_context(handled(self._on_stop, reloader.request))
            stack.callback(asyncio.create_task(reloader.run()).cancel)
            stack.callback(self._sockets.close)
            self._trace(stack)
            stack.push_async_callback(self._stop_engines)
            try:
                address = await self._listen(stack)
            except OSError as error:
                return _fail(str(error))
            return await self._serve(address)

    def _trace(self, stack: AsyncExitStack) -> None:
        if self._settings.otlp_endpoint is not None:
            from chairlift.api.observe.tracing import Tracing, otlp_processor

            tracing = self._service.tracing = Tracing(otlp_processor(self._settings.otlp_endpoint))
            stack.push_async_callback(asyncio.to_thread, tracing.close)

    async def _listen(self, stack: AsyncExitStack) -> str:
        """Starts listening; ``stack`` undoes it. Returns the server's address.

        Raises:
            OSError: a socket cannot listen, or the folder of files cannot be used. The message is
                one line.
        """
        settings, sockets = self._settings, self._sockets
        tls = None if self._certificate is None else self._certificate.context
        runner = await listen(self._service, sockets.api, tls)
        stack.push_async_callback(runner.cleanup)
        if settings.file_dir is not None and settings.file_dir_bytes:
            await runner.app[STORAGE].open()
        if sockets.metrics is not None:
            scrapes = await listen_for_scrapes(self._service, sockets.metrics)
            stack.push_async_callback(scrapes.cleanup)
            logger.info("metrics on %s", address_of(scrapes, None))
        address = address_of(runner, tls)
        logger.info("listening on %s", address)
        if not settings.keys and not is_loopback(settings.host):
            logger.warning(
                "anybody who reaches %s may use this server: there is no API key "
                "(--api-key, --api-key-file, CHAIRLIFT_API_KEY)",
                address,
            )
        return address

    async def _stop_engines(self) -> None:
        await self._service.models.close()

    def _on_stop(self) -> None:
        if self._stop.is_set():  # a second signal stops the process at once
            os._exit(INTERRUPTED)
        logger.info("stopping; requests have %g s to finish", self._settings.drain_seconds)
        self._stop.set()

    async def _serve(self, address: str) -> int:
        stopped = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self._load())
        await asyncio.wait({stopped, loading}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return 0
        try:
            loading.result()
        except (ModelError, EngineDead) as error:
            return _fail(str(error))
        except Exception as error:
            # Files of a model can be damaged in ways that only a library finds, with any exception.
            logger.debug("the start has failed: %s", redacted_traceback(error))
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            return _fail(f"{self._specs[0].config.model}: the model cannot be served: {cause}")
        finally:
            self._progress.close()
        self._announce(address)
        ended = asyncio.create_task(self._service.models.ended())
        await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            ended.cancel()
            cut = await self._service.drain.finish(self._settings.drain_seconds)
            if cut:
                logger.warning("%d requests took too long and were ended", cut)
            return 0
        return _fail(ended.result())

    async def _load(self) -> None:
        """Finds all models, and loads those that are loaded at the start."""
        service = self._service
        tools = LoaderTools(
            *(self._supervision, service.workers, service.image_workers),
            *(service.recorder, service.record_restart),
        )
        try:
            pool = await make_pool(self._specs, self._models_memory, tools, service)
        except asyncio.CancelledError:
            self.left_fetch = True
            raise
        service.serve(pool)
        if len(pool.entries) == 1:  # the progress of several would be mixed up
            pool.entries[0].on_progress = self._progress
        pool.begin()
        await pool.start()
        pool.entries[0].on_progress = silent

    def _announce(self, address: str) -> None:
        for model in self._service.loaded_models:
            about = (model.name, model.info, address, self._settings.ui)
            fields = {BANNER: banner_lines(*about), **banner_fields(*about)}
            logger.info("ready", extra=fields)
        if not self._service.loaded_models:
            logger.info("ready; every model is loaded on first use: %s/v1/models", address)


def _fail(message: str) -> int:
    logger.critical("%s", message)
    return 1
