"""A model that is loaded: its engine, its vocabulary and its defaults."""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from chairlift.api.http.version import VERSION
from chairlift.api.observe.canary import Canary
from chairlift.api.schemas.sampling_defaults import SamplingDefaults
from chairlift.engine.client.interface import EngineClient, TokenStream
from chairlift.engine.messages import ModelInfo, Pooling, Submit

if TYPE_CHECKING:
    # It imports transformers, which takes a second.
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

    @property
    def info(self) -> ModelInfo:
        """The model's properties; a restart of the engine may change ``max_context``."""
        assert self.client.info is not None, "loaded"
        return self.client.info

    def submit(self, request: Submit) -> TokenStream:
        """Submits a user's request, through the canary if there is one."""
        return (self.canary or self.client).submit(request)

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's system fingerprint: it changes with anything that may change a seed's tokens."""
        info = self.info
        facts = (
            *(VERSION, self.name, info.architecture, info.dtype, info.device),
            *(info.kv_bits, info.kv_group_size, self.defaults),
        )
        return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
