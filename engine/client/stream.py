"""One request's stream in the API process: its choices' received tokens and its consumer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from chairlift.engine.client.choices import RunningChoice
from chairlift.engine.messages import (
    Abort,
    FinishedChoice,
    FinishReason,
    Submit,
    ToEngine,
    TokenOutput,
)
from chairlift.scheduler.forecast import Claim, Forecast


class StreamOwner(Protocol):
    """A stream's engine client. ``last_step`` is in seconds of ``time.monotonic()``."""

    forecast: Forecast
    last_step: float

    def send(self, message: ToEngine) -> None: ...
    def report(self, choices: list[FinishedChoice]) -> None: ...
    def forget(self, request_id: str) -> None: ...


class Stream:
    """The outputs of one request; see ``interface.TokenStream``.

    Attributes:
        admitted: the request was sent to the current engine.
        scheduled: when an engine first scheduled it, in seconds of ``time.monotonic()``; None if
            that is not known.
        last_output: the tokens of the choice that has ended last.
    """

    def __init__(self, request: Submit, client: StreamOwner, claim: Claim) -> None:
        self.admitted = False
        self.scheduled: float | None = None
        self.last_output: list[int] = []
        self._request = request
        self._client = client
        self._claim = claim
        self._running = {index: RunningChoice() for index in range(request.n)}
        self._arrived: list[TokenOutput] = []
        self._death: Exception | None = None
        # The future that a waiting consumer awaits: done at the next output, or at the end.
        self._change: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        """The request's id in the engine."""
        return self._request.request_id

    @property
    def request(self) -> Submit:
        """The request as it was submitted, under its present id."""
        return self._request

    @property
    def tokens(self) -> int:
        """The maximum number of tokens of prompt and output."""
        return len(self._request.prompt) + self._request.params.max_tokens

    @property
    def adapter(self) -> str:
        """The key of the request's LoRA adapter; "" is none."""
        return self._request.adapter

    @property
    def replay(self) -> bool:
        """Whether the server's canary submitted it."""
        return self._request.replay

    @property
    def unfinished(self) -> int:
        """The number of running choices."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """See ``interface.TokenStream.waiting``."""
        return len(self._arrived)

    @property
    def progress(self) -> dict[int, int]:
        """The number of output tokens of each running choice."""
        return {index: len(choice.output) for index, choice in self._running.items()}

    def submission(self) -> Submit:
        """The message that submits the request to an engine, with its output so far."""
        running, request = self._running, self._request
        if len(running) == request.n and not any(choice.output for choice in running.values()):
            return request
        resumed = (choice.resumed(index, self.scheduled) for index, choice in running.items())
        return msgspec.structs.replace(request, resumed=tuple(resumed))

    @property
    def uncomputed(self) -> int:
        """The tokens of prompt and outputs that another engine without a cache would compute."""
        outputs = sum(len(choice.output) for choice in self._running.values())
        return len(self._request.prompt) + outputs

    def move(self, client: StreamOwner, uncomputed: int) -> None:
        """Gives the request to another engine client.

        Args:
            uncomputed: the tokens that the client's engine has to compute first, for its forecast.
        """
        request = self._request
        self._client.forecast.remove(self._claim)
        # The first output ends the claim's prompt, so there is one.
        self._claim = client.forecast.add(
            request.priority, request.arrival, max(1, uncomputed), self._claim.output
        )
        self._client = client

    def rename(self, request_id: str) -> None:
        """Changes the id; outputs still sent under the old id are ignored."""
        self._request = msgspec.structs.replace(self._request, request_id=request_id)

    def put(self, output: TokenOutput) -> None:
        """Adds an output from the engine; ignored if its choice has ended."""
        choice = self._running.get(output.index)
        if choice is None:
            return
        if self._claim.prompt:
            self._client.forecast.begin(self._claim)
        self._claim.spend(len(output.token_ids))
        choice.add(output, self._client.last_step)
        if output.finish is not None:
            self._end(output.index)
        self._arrived.append(output)
        self._wake()

    def give_up(self, why: str) -> None:
        """Ends all running choices as "error" without informing the engine."""
        running = list(self._running)
        ended = self._finished(running, "error")
        for index in running:
            self.put(TokenOutput(self.request_id, index, [], finish="error", error=why))
        self._client.report(ended)

    def fail(self, death: Exception) -> None:
        """Ends the stream with an exception."""
        self._death = death
        self._wake()

    async def __aiter__(self) -> AsyncIterator[list[TokenOutput]]:
        while self._running or self._arrived:
            if not self._arrived and self._death is None:
                self._change = asyncio.get_running_loop().create_future()
                await self._change
            arrived, self._arrived = self._arrived, []
            if arrived:
                yield arrived
            if self._death is not None and self._running:
                raise self._death

    def stop(self, index: int) -> None:
        """See ``interface.TokenStream.stop``."""
        if index in self._running:
            self._abort(Abort(self.request_id, index, "stop"), [index])

    def close(self) -> None:
        """See ``interface.TokenStream.close``."""
        if self._running:
            self._abort(Abort(self.request_id), list(self._running))
            self._wake()

    def _wake(self) -> None:
        # NOTE: a future rather than an ``asyncio.Event``, which takes half a microsecond longer.
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def _abort(self, abort: Abort, choices: list[int]) -> None:
        """Ends choices in the engine, which reports them; without an engine, reports them here."""
        if self.admitted:
            self._client.send(abort)
        ended = [] if self.admitted else self._finished(choices, abort.reason)
        for index in choices:
            self._end(index)
        self._client.report(ended)

    def _finished(self, choices: list[int], reason: FinishReason) -> list[FinishedChoice]:
        now = time.monotonic()
        running = (self._running[index] for index in choices if not self.replay)
        return [choice.finished(self._request, reason, self.scheduled, now) for choice in running]

    def _end(self, index: int) -> None:
        choice = self._running.pop(index)
        self.last_output = choice.output
        self._claim.spend(self._request.params.max_tokens - len(choice.output))
        if not self._running:
            self._client.forecast.remove(self._claim)
            self._client.forget(self.request_id)
