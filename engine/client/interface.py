"""The interface of an engine, whether it runs in its own process or on a thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from chairlift.engine.client.adapters import AdapterTable
from chairlift.engine.messages import ModelInfo, OnProgress, StepStats, Submit, TokenOutput


class TokenStream(Protocol):
    """The outputs of one submitted request, all its choices interleaved."""

    def __aiter__(self) -> AsyncIterator[list[TokenOutput]]:
        """Yields the outputs that have arrived, at least one, until every choice has finished.

        The outputs of one item are those of one step, or of several if the consumer was slow.

        Raises:
            EngineDead: the engine ended before the request did.
        """
        ...

    @property
    def waiting(self) -> int:
        """The number of outputs that have arrived and were not consumed yet."""
        ...

    def stop(self, index: int) -> None:
        """Ends one choice as "stop", because its stop string was found. Its further outputs are not
        yielded."""
        ...

    def close(self) -> None:
        """Ends all running choices as "abort", and the iteration. Does nothing if none runs."""
        ...


class EngineClient(Protocol):
    """Submits requests to an engine and streams their tokens back."""

    @property
    def info(self) -> ModelInfo | None:
        """Facts about the model; None while it is loading."""
        ...

    @property
    def unhealthy(self) -> str | None:
        """Why requests cannot be served now ("loading the model", …), or None when they can."""
        ...

    @property
    def degraded(self) -> str | None:
        """Which of several engines do not serve now, and why; None if all do."""
        ...

    @property
    def unfinished(self) -> int:
        """Running and waiting choices of all users' requests; replays are not counted."""
        ...

    @property
    def accepts(self) -> bool:
        """Whether ``submit`` accepts requests. While ``unhealthy``, accepted requests wait."""
        ...

    @property
    def adapters(self) -> AdapterTable | None:
        """The engine's LoRA adapters; None if it takes none."""
        ...

    @property
    def on_step(self) -> Callable[[StepStats], None]:
        """Called with each step's stats, in the event loop. Settable."""
        ...

    @on_step.setter
    def on_step(self, listener: Callable[[StepStats], None]) -> None: ...

    async def start(self, on_progress: OnProgress = ...) -> ModelInfo:
        """Starts the engine and waits until it can serve.

        Raises:
            ModelError: the model cannot be loaded.
            EngineDead: the engine ended while starting.
        """
        ...

    def check_room(self, choices: int, priority: int) -> None:
        """Checks the queue as ``submit`` will, before any work is done for a request.

        Raises:
            QueueFull: this many choices of that class would not be accepted now.
        """
        ...

    def submit(self, request: Submit) -> TokenStream:
        """Submits a request to the engine; returns at once.

        Raises:
            PromptTooLong: prompt and ``max_tokens`` do not fit ``info.max_context``.
            QueueFull: too many requests are unfinished; ``retry_after`` is the predicted wait.
            EngineDead: the engine has ended or is not ready.
        """
        ...

    async def died(self) -> str:
        """Waits until the engine has ended permanently; returns why."""
        ...

    async def stop(self) -> None:
        """Ends the engine and frees its resources."""
        ...
