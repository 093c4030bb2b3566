"""A model that is loaded: its engine, its vocabulary and its defaults."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Container
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from chairlift.api.http.version import VERSION
from chairlift.api.observe.canary import Canary
from chairlift.api.schemas.sampling_defaults import SamplingDefaults
from chairlift.engine.client.adapters import Adapter, AdapterTable
from chairlift.engine.client.interface import EngineClient, TokenStream
from chairlift.engine.errors import AdapterError
from chairlift.engine.messages import ModelInfo, Pooling, Submit

if TYPE_CHECKING:
    # These import transformers, which takes a second.
    from chairlift.api.text.images.vision import Vision
    from chairlift.api.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class ServedModel:
    """A loaded model.

    Attributes:
        name: the model's id in the API.
        client: submits requests to its engine.
        vocabulary: its tokenizer and chat format.
        canary: replays finished rows, or None.
        root: the model's own name if ``name`` is another, else None.
        defaults: the sampling of requests that give no value of their own.
        pooling: the pooling of embeddings for requests that name none.
        created: the time of loading, in Unix seconds.
        seeds: draws the seeds of requests that give none.
        adapters: its LoRA adapters; None if its engine takes none.
        adapter: the LoRA adapter that ``name`` stands for; None for the model itself.
        format: the format of its files.
        vision: prepares its prompts with images; None if it takes none.
        base: the model that ``adapter`` changes; None for the model itself.
    """

    name: str
    client: EngineClient
    vocabulary: Vocabulary
    canary: Canary | None = None
    root: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    pooling: Pooling = "mean"
    created: int = field(default_factory=lambda: int(time.time()))
    seeds: random.Random = field(default_factory=random.Random)
    adapters: AdapterTable | None = None
    adapter: Adapter | None = None
    base: ServedModel | None = None
    vision: Vision | None = None
    format: Literal["gguf", "safetensors"] = "safetensors"

    @property
    def info(self) -> ModelInfo:
        """The model's properties; a restart of the engine may change ``max_context``."""
        assert self.client.info is not None, "loaded"
        return self.client.info

    @property
    def input_modalities(self) -> list[str]:
        """The types of content that messages may have: text, and images for a vision model."""
        return ["text"] if self.vision is None else ["text", "image"]

    def submit(self, request: Submit) -> TokenStream:
        """Submits a user's request, through the canary if there is one."""
        if self.adapter is not None:
            request = msgspec.structs.replace(request, adapter=self.adapter.key)
        return (self.canary or self.client).submit(request)

    @property
    def engine_name(self) -> str:
        """The name of the model that the engine was started for, without an adapter."""
        return self.name if self.base is None else self.base.name

    @property
    def adapted(self) -> list[ServedModel]:
        """This model with each of its LoRA adapters, as a model of its own."""
        loaded = () if self.adapters is None else self.adapters.loaded.values()
        return [
            replace(self, name=one.name, adapter=one, base=self, created=one.created)
            for one in loaded
        ]

    def with_adapter(self, names: Container[str]) -> ServedModel | None:
        """This model with its first adapter that has one of these names; None if none has."""
        return next((model for model in self.adapted if model.name in names), None)

    async def load_adapter(self, name: str, folder: Path, replace: bool = False) -> ServedModel:
        """Loads an adapter under a name of its own; returns the model with it.

        Args:
            replace: another adapter of that name is replaced.

        Raises:
            AdapterError: the name is taken, or the adapter cannot be loaded.
            EngineDead: the engine has ended, perhaps by the adapter.
        """
        if self.adapters is None:
            raise AdapterError(f"the engine of {self.name!r} takes no adapters")
        await self.adapters.load(name, str(folder), replace)
        adapted = self.with_adapter((name,))
        if adapted is None:
            raise AdapterError(f"the adapter {name!r} was unloaded at once")
        return adapted

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's system fingerprint: it changes with anything that may change a seed's tokens."""
        info = self.info
        facts = (
            *(VERSION, self.name, info.architecture, info.dtype, info.device),
            *(info.kv_bits, info.kv_group_size, self.defaults),
            self.adapter and self.adapter.digest,
        )
        return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
