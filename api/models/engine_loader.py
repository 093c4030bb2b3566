"""Starts and ends the engine of one model, and loads its vocabulary in this process."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from chairlift.api.models.served_model import ServedModel
from chairlift.api.models.spec import ModelSpec
from chairlift.api.observe.canary import Canary
from chairlift.api.schemas.sampling_defaults import SamplingDefaults, sampling_defaults
from chairlift.api.settings import ServerSettings
from chairlift.api.text.chat_format import chat_format
from chairlift.api.text.images.loading import ImageLoader
from chairlift.engine.client.factory import make_client
from chairlift.engine.client.interface import EngineClient
from chairlift.engine.client.process_client import RestartReason
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import AdapterError, EngineDead, ModelError
from chairlift.engine.hub.folder_check import read_config
from chairlift.engine.hub.generation_config import end_token_ids, read_generation_config
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.messages import ModelInfo, OnProgress
from chairlift.engine.workers.pool import Workers
from chairlift.metrics.recorder import Recorder

if TYPE_CHECKING:
    # These import transformers, which takes a second.
    from chairlift.api.text.images.vision import Vision
    from chairlift.api.text.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class LoaderTools(NamedTuple):
    """The tools that the loaders of all models share.

    Attributes:
        supervision: the limits for engines that hang or fail.
        workers: for the vocabularies' slow work.
        image_workers: for decoding images.
        recorder: records what the canaries find.
        on_restart: called with the reason before each restart of an engine process.
    """

    supervision: Supervision
    workers: Workers
    image_workers: Workers
    recorder: Recorder
    on_restart: Callable[[RestartReason], None]


class EngineLoader:
    """Loads one model as often as the pool asks for it; see ``entry.Loader``.

    The vocabulary stays in memory when the model is unloaded, so that only the first load makes it.

    Args:
        name: the model's id in the API.
        spec: how it is served.
        config: its engine's settings, with its part of the memory.
        source: the model on disk.
        tools: shared by all models.
    """

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        config: EngineConfig,
        source: ModelSource,
        tools: LoaderTools,
    ) -> None:
        self._name = name
        self._settings = spec.settings
        self._config = config
        self._source = source
        self._tools = tools
        self._seeds = random.Random(spec.settings.seed)
        self._text: tuple[Vocabulary, SamplingDefaults] | None = None
        self._canary: asyncio.Task[None] | None = None

    async def load(self, on_progress: OnProgress) -> ServedModel:
        """Starts an engine, and loads the vocabulary the first time.

        Raises:
            ModelError, AdapterError, EngineDead: the model cannot be served. The message is one
                line.
        """
        log_level = logging.getLevelName(logger.getEffectiveLevel())
        client = make_client(
            *(self._config, self._source, log_level, self._settings.log_format),
            *(self._tools.supervision, self._tools.on_restart),
        )
        try:
            return await self._load(client, on_progress)
        except BaseException as error:
            self._stop_canary()
            await client.stop()
            known = isinstance(error, ModelError | AdapterError | EngineDead)
            if known or not isinstance(error, Exception):
                raise
            # Files of a model can be damaged in ways that only a library finds, with any exception.
            logger.debug("the load has failed: %s", redacted_traceback(error))
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            model = self._config.model
            raise ModelError(f"{model}: the model cannot be served: {cause}") from error

    async def unload(self, model: ServedModel) -> None:
        """Ends the model's engine."""
        self._stop_canary()
        await model.client.stop()

    async def _load(self, client: EngineClient, on_progress: OnProgress) -> ServedModel:
        starting = asyncio.create_task(client.start(on_progress))
        # One turn of the event loop starts the engine before the imports, which take a second.
        await asyncio.sleep(0)
        try:
            if self._text is None:
                self._text = await self._load_text(starting)
            await starting
        except BaseException:
            starting.cancel()
            raise
        vocabulary, defaults = self._text
        model = ServedModel(
            *(self._name, client, vocabulary, self._start_canary(client)),
            root=self._source.name,
            defaults=defaults,
            pooling=self._settings.embedding_pooling,
            seeds=self._seeds,
            adapters=client.adapters if self._config.takes_adapters else None,
            vision=self._vision(client.info, vocabulary),
            format="gguf" if self._source.kind == "gguf" else "safetensors",
        )
        for name, folder in self._settings.loras:
            await model.load_adapter(name, folder)
        return model

    def _vision(self, info: ModelInfo | None, vocabulary: Vocabulary) -> Vision | None:
        if info is None or info.vision_type is None:
            return None
        from chairlift.api.text.images.vision import Vision

        source, settings = self._source, self._settings
        domains = frozenset(domain.lower() for domain in settings.allowed_media_domains)
        loader = ImageLoader(domains, settings.allowed_local_media_path)
        return Vision(
            *(vocabulary, self._tools.image_workers, loader, source.path),
            *(info.vision_type, source.trust_remote_code),
        )

    async def _load_text(
        self, starting: asyncio.Task[ModelInfo]
    ) -> tuple[Vocabulary, SamplingDefaults]:
        # NOTE: these import MLX, although this process computes nothing with it. Importing it in a
        # thread sometimes ends the process with "terminate called without an active exception".
        from chairlift.api.text.vocabulary import Vocabulary
        from chairlift.engine.model.architecture import check_architecture
        from chairlift.engine.model.text.tokenizer import load_tokenizer
        from chairlift.engine.model.vision.processors.processing import template_of

        source, settings = self._source, self._settings
        if source.kind == "directory":
            # An unknown architecture also makes transformers fail, with an error of its own.
            check_architecture(source.path, read_config(source.path), self._config.text_only)
        info, tokenizer, (defaults, end_ids) = await asyncio.gather(
            starting,
            asyncio.to_thread(load_tokenizer, source, settings.chat_template),
            asyncio.to_thread(_generation_defaults, source, settings),
        )
        if info.vision_type is not None and not tokenizer.has_chat_template:
            template = await asyncio.to_thread(template_of, info.vision_type)
            tokenizer = await asyncio.to_thread(load_tokenizer, source, template)
        tokenizer.eos_token_ids = tokenizer.eos_token_ids | end_ids
        format = chat_format(tokenizer, settings.tool_parser, settings.think_tags)
        vocabulary = Vocabulary(tokenizer, info.vocab_size, self._tools.workers, format)
        # Exempt loaded objects from garbage collection, which would block all streams for 45 ms.
        gc.collect()
        gc.freeze()
        self._tools.workers.warm()
        if info.vision_type is not None:
            self._tools.image_workers.warm()
        return vocabulary, defaults

    def _start_canary(self, client: EngineClient) -> Canary | None:
        interval = self._settings.canary_interval
        if not interval:
            return None
        canary = Canary(client, self._tools.recorder, interval)
        self._canary = asyncio.create_task(canary.run())
        return canary

    def _stop_canary(self) -> None:
        if self._canary is not None:
            self._canary.cancel()
            self._canary = None


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
