"""The engine as its users see it, whether it runs in its own process or not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from chairlift.engine.messages import ModelInfo, StepStats, Submit, TokenOutput


class TokenStream(Protocol):
    """The outputs of one submitted request, all its choices interleaved."""

    def __aiter__(self) -> AsyncIterator[list[TokenOutput]]:
        """Yields the outputs that have arrived, at least one, until every choice has finished.

        They are of one step, or of several if the one who asks was late.

        Raises:
            EngineDead: the engine ended before the request did.
        """
        ...

    @property
    def waiting(self) -> int:
        """Outputs that have arrived and were not asked for yet."""
        ...

    def stop(self, index: int) -> None:
        """Ends one choice as finished ("stop"): its stop string was found. Yields no more of it."""
        ...

    def close(self) -> None:
        """Ends whatever still runs of this request as "abort", and who waits for its outputs waits
        no longer. Harmless when nothing does."""
        ...


class EngineClient(Protocol):
    """Submits requests to an engine and streams their tokens back."""

    @property
    def info(self) -> ModelInfo | None:
        """The model's facts, or None while it is loading."""
        ...

    @property
    def unhealthy(self) -> str | None:
        """Why requests cannot be served now ("loading the model", …), or None when they can."""
        ...

    @property
    def unfinished(self) -> int:
        """Choices of all users' requests that still run or wait; a replay's are not counted."""
        ...

    @property
    def accepts(self) -> bool:
        """Whether ``submit`` takes requests; while ``unhealthy``, they wait until that is over."""
        ...

    @property
    def on_step(self) -> Callable[[StepStats], None]:
        """Called with each step's stats, in the event loop. Settable."""
        ...

    @on_step.setter
    def on_step(self, listener: Callable[[StepStats], None]) -> None: ...

    async def start(self, on_progress: Callable[[str], None] = ...) -> ModelInfo:
        """Starts the engine and waits until it can serve.

        Raises:
            ModelError: the model cannot be loaded.
            EngineDead: the engine ended while starting.
        """
        ...

    def check_room(self, choices: int, priority: int) -> None:
        """Asks what ``submit`` will say of the queue, before anything is done for a request.

        Raises:
            QueueFull: so many choices of that class would not be accepted now.
        """
        ...

    def submit(self, request: Submit) -> TokenStream:
        """Hands a request to the engine; returns at once.

        Raises:
            PromptTooLong: the prompt leaves no room for one token in ``info.max_context``.
            QueueFull: too many unfinished requests; it carries the predicted wait.
            EngineDead: the engine has ended or is not ready.
        """
        ...

    async def died(self) -> str:
        """Waits until the engine has ended for good, given up or stopped, and returns why."""
        ...

    async def stop(self) -> None:
        """Ends the engine and frees what it holds."""
        ...
