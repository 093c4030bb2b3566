"""Runs the server: listens at once, loads the model in the background, returns the exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import sys
from contextlib import AsyncExitStack

import uvloop

from chairlift.api.batches.storage import STORAGE
from chairlift.api.observe.canary import Canary
from chairlift.api.openai.adapters import load_adapter
from chairlift.api.schemas.sampling_defaults import SamplingDefaults, sampling_defaults
from chairlift.api.server.banner import banner_fields, banner_lines
from chairlift.api.server.listen import address_of, is_loopback, listen, listen_for_scrapes
from chairlift.api.server.reload import Reloader
from chairlift.api.server.signals import INTERRUPTED, handled
from chairlift.api.server.sockets import Sockets
from chairlift.api.server.start_progress import StartProgress
from chairlift.api.server.tls import Certificate
from chairlift.api.service import ServedModel, Service
from chairlift.api.settings import ServerSettings
from chairlift.api.text.chat_format import chat_format
from chairlift.engine.client.interface import EngineClient
from chairlift.engine.client.process_client import ProcessClient
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import AdapterError, EngineDead, ModelError
from chairlift.engine.hub.folder_check import check_directory, read_config
from chairlift.engine.hub.source import ModelSource, resolve
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.logs.setup import BANNER
from chairlift.engine.model.generation_config import end_token_ids, read_generation_config

logger = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005


def serve(server: Server) -> int:
    """Serves until SIGINT, SIGTERM or the engine's end; returns the process's exit code."""
    # A thread that renders a chat template waits this long for a busy event loop to yield.
    sys.setswitchinterval(SWITCH_SECONDS)
    return uvloop.run(server.run())


class Server:
    """One run of the server. It closes ``sockets`` at the end."""

    def __init__(
        self,
        settings: ServerSettings,
        config: EngineConfig,
        supervision: Supervision,
        sockets: Sockets,
        certificate: Certificate | None = None,
    ) -> None:
        self._settings = settings
        self._config = config
        self._supervision = supervision
        self._sockets = sockets
        self._certificate = certificate
        self._service = Service(settings)
        self._progress = StartProgress(self._service)
        self._client: EngineClient | None = None
        self._canary: asyncio.Task[None] | None = None
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
            stack.push_async_callback(self._stop_engine)
            try:
                address = await self._listen(stack)
            except OSError as error:
                return _fail(str(error))
            stack.callback(self._stop_canary)
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

    async def _stop_engine(self) -> None:
        if self._client is not None:
            await self._client.stop()

    def _stop_canary(self) -> None:
        if self._canary is not None:
            self._canary.cancel()

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
            model = loading.result()
        except (ModelError, AdapterError, EngineDead) as error:
            return _fail(str(error))
        except Exception as error:
            # Files of a model can be damaged in ways that only a library finds, with any exception.
            logger.debug("the start has failed: %s", redacted_traceback(error))
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            return _fail(f"{self._config.model}: the model cannot be served: {cause}")
        finally:
            self._progress.close()
        self._announce(model, address)
        died = asyncio.create_task(model.client.died())
        await asyncio.wait({stopped, died}, return_when=asyncio.FIRST_COMPLETED)
        if not died.done():
            died.cancel()
            cut = await self._service.drain.finish(self._settings.drain_seconds)
            if cut:
                logger.warning("%d requests took too long and were ended", cut)
            return 0
        return _fail(died.result())

    async def _load(self) -> ServedModel:
        config = self._config
        source = await asyncio.to_thread(
            resolve, config.model, config.trust_remote_code, config.revision
        )
        if source.kind == "directory":
            check_directory(source.path)
        log_level = logging.getLevelName(logger.getEffectiveLevel())
        client = self._client = ProcessClient(
            config, source, log_level, self._settings.log_format, self._supervision
        )
        client.on_restart = self._service.record_restart
        starting = asyncio.create_task(client.start(self._progress))
        # One turn of the event loop starts the engine before the imports, which take a second.
        await asyncio.sleep(0)
        # NOTE: these import MLX, although this process computes nothing with it. Importing it in a
        # thread sometimes ends the process with "terminate called without an active exception".
        from chairlift.api.text.vocabulary import Vocabulary
        from chairlift.engine.model.architecture import check_architecture
        from chairlift.engine.model.tokenizer import load_tokenizer

        if source.kind == "directory":
            # An unknown architecture also makes transformers fail, with an error of its own.
            check_architecture(source.path, read_config(source.path))
        info, tokenizer, (defaults, end_ids) = await asyncio.gather(
            starting,
            asyncio.to_thread(load_tokenizer, source, self._settings.chat_template),
            asyncio.to_thread(_generation_defaults, source, self._settings),
        )
        tokenizer.eos_token_ids = tokenizer.eos_token_ids | end_ids
        name = self._settings.served_model_name or source.name
        canary = self._start_canary(client)
        format = chat_format(tokenizer, self._settings.tool_parser, self._settings.think_tags)
        vocabulary = Vocabulary(tokenizer, info.vocab_size, self._service.workers, format)
        model = ServedModel(
            *(name, client, vocabulary, canary, source.name, defaults),
            seeds=random.Random(self._settings.seed),
            adapters=client.adapters,
        )
        for lora in self._settings.loras:
            await load_adapter(model, client.adapters, *lora)
        # Exempt loaded objects from garbage collection, which would block all streams for 45 ms.
        gc.collect()
        gc.freeze()
        self._service.workers.warm()
        self._service.model_loaded(model)
        return model

    def _start_canary(self, client: EngineClient) -> Canary | None:
        interval = self._settings.canary_interval
        if not interval:
            return None
        canary = Canary(client, self._service.recorder, interval)
        self._canary = asyncio.create_task(canary.run())
        return canary

    def _announce(self, model: ServedModel, address: str) -> None:
        about = (model.name, model.info, address, self._settings.ui)
        fields = {BANNER: banner_lines(*about), **banner_fields(*about)}
        logger.info("ready", extra=fields)


def _generation_defaults(
    source: ModelSource, settings: ServerSettings
) -> tuple[SamplingDefaults, frozenset[int]]:
    """The default sampling, and further ids that end a text.

    Raises:
        ModelError: the generation config cannot be read, or has a value that is out of range.
    """
    choice, override = settings.generation_config, settings.override_generation_config
    config = read_generation_config(source, choice, override)
    defaults = sampling_defaults(config.values)
    logger.info("default sampling: %s (%s)", defaults, config.origin)
    return defaults, end_token_ids(config)


def _fail(message: str) -> int:
    logger.critical("%s", message)
    return 1
