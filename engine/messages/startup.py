"""Reports of what an engine loads: its progress, the model, LoRA adapters; or why that failed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from chairlift.scheduler.limits import Limits


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Progress while the engine starts.

    Attributes:
        text: what it is doing.
        done, total: bytes done and bytes in all; 0 if the duration is unknown or short.
    """

    text: str
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        """One line: "loading weights: 57 of 98 MB"."""
        if not self.total:
            return self.text
        return f"{self.text}: {self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB"


OnProgress = Callable[[Loading], None]


def silent(loading: Loading) -> None:
    """Ignores progress."""


class ModelInfo(msgspec.Struct, tag=True, frozen=True):
    """Sent once, when the engine is ready.

    Attributes:
        device: the name of the hardware that MLX computes on.
        on_cpu: whether that is the CPU.
        max_context: maximum tokens of a request, prompt and output: the model's limit, the
            configured one, or what fits the KV memory, whichever is least.
        limits: the scheduler's limits.
        prefix_bytes: memory of the prefix cache; 0 if it is off.
        replicas: engines of the model. ``max_rows``, ``kv_limit_bytes`` and ``prefix_bytes`` are
            sums over them; a request with all its choices is computed by one.
        advice: one line about each thing that would make this machine faster.
        kv_bits, kv_group_size: of a quantized KV cache; None if it is not quantized.
        speculates: tokens of every request are proposed (``EngineConfig.speculative``).
        vision_type: the type of a model that takes images (``vision.families``); None: it takes
            none.
        hidden_size: numbers of a last hidden state; None if the model does not expose them.
    """

    architecture: str
    dtype: str
    device: str
    on_cpu: bool
    vocab_size: int
    max_context: int
    max_rows: int
    max_queue: int
    kv_limit_bytes: int
    kv_bytes_per_token: int
    weight_bytes: int
    limits: Limits
    kv_bits: int | None = None
    kv_group_size: int | None = None
    hidden_size: int | None = None
    prefix_bytes: int = 0
    advice: tuple[str, ...] = ()
    replicas: int = 1
    speculates: bool = False
    vision_type: str | None = None

    @property
    def max_choices(self) -> int:
        """The maximum choices of one request: the rows of one engine."""
        return self.max_rows // self.replicas

    def shortage(self, tokens: int) -> str | None:
        """Explains why this many tokens never fit the KV memory; None if another limit is lower."""
        if self.limits.max_context > self.max_context or tokens <= self.max_context:
            return None
        return self.limits.shortage(tokens)


class AdapterLoaded(msgspec.Struct, tag=True, frozen=True):
    """Requests may name the LoRA adapter ``key`` from now on.

    Attributes:
        digest: SHA-256 of its files.
        rank: the width of its matrices.
    """

    key: str
    digest: str
    rank: int


class AdapterFailed(msgspec.Struct, tag=True, frozen=True):
    """The LoRA adapter ``key`` cannot be loaded; ``message`` is one line."""

    key: str
    message: str


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start; ``message`` is one line."""

    message: str
