"""The ``options`` of Ollama's requests, and the sampling fields that they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from chairlift.api.schemas.field_types import Ignored, only
from chairlift.api.schemas.fields import Stops
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.sampling_defaults import (
    MinP,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)

# The field of a chat request by the option with the same meaning; its error names the option.
SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
    "max_tokens": "num_predict",
}


class OllamaOptions(Request):
    """An option that is absent has the server's default, not Ollama's.

    Attributes:
        num_predict: the maximum number of tokens; 0 or less means what the context has left.
        seed: -1 means a random one.
    """

    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    repeat_penalty: RepetitionPenalty = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops | None = None
    typical_p: Annotated[Any, *only(1, 1.0)] = None
    tfs_z: Annotated[Any, *only(1, 1.0)] = None
    mirostat: Annotated[Any, *only(0)] = None
    penalize_newline: Annotated[Any, *only(True)] = None
    # Without effect unless mirostat is on, which is refused.
    mirostat_tau: Ignored = None
    mirostat_eta: Ignored = None
    # Penalties count all tokens of prompt and reply, as vLLM's do.
    repeat_last_n: Ignored = None
    # The server's flags decide how the model is loaded, and how long its context is. No part of a
    # context is ever dropped.
    num_ctx: Ignored = None
    num_keep: Ignored = None
    num_batch: Ignored = None
    num_gpu: Ignored = None
    main_gpu: Ignored = None
    num_thread: Ignored = None
    numa: Ignored = None
    low_vram: Ignored = None
    f16_kv: Ignored = None
    logits_all: Ignored = None
    vocab_only: Ignored = None
    use_mmap: Ignored = None
    use_mlock: Ignored = None
    embedding_only: Ignored = None

    @property
    def max_tokens(self) -> int | None:
        """The maximum number of tokens; None means what the context has left."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    @property
    def sampling(self) -> dict[str, object]:
        """The fields of a chat request that are given, all but ``max_tokens``."""
        given = {field: getattr(self, option) for field, option in SAMPLING.items()}
        del given["max_tokens"]
        if self.seed == -1:
            del given["seed"]
        return {field: value for field, value in given.items() if value is not None}
