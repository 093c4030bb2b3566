"""What the two engine clients have in common: the open requests, and who gets which tokens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable

from chairlift.engine.errors import EngineDead, ModelError, PromptTooLong, QueueFull
from chairlift.engine.messages import (
    Abort,
    FromEngine,
    Loading,
    ModelInfo,
    StartFailed,
    StepOutput,
    StepStats,
    Submit,
    ToEngine,
    TokenOutput,
)
from chairlift.scheduler.forecast import Claim, Forecast

# No step for this long while requests are unfinished: something hangs.
STALL_SECONDS = 60.0
# However long the wait, it pays to ask again; nor can anybody foresee more than this.
MAX_RETRY_AFTER = 600


class Stream:
    """The outputs of one request; see ``interface.TokenStream``."""

    def __init__(self, request: Submit, client: StreamingClient, claim: Claim) -> None:
        self._request = request
        self._client = client
        self._claim = claim
        # Choices that still run, and how many tokens each may yet have.
        self._running = dict.fromkeys(range(request.n), request.params.max_tokens)
        self._arrived: list[TokenOutput] = []
        self._death: EngineDead | None = None
        self._wake = asyncio.Event()

    @property
    def unfinished(self) -> int:
        """Choices that still run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """See ``interface.TokenStream.waiting``."""
        return len(self._arrived)

    def put(self, output: TokenOutput) -> None:
        """Takes an output from the engine; one of a choice that has ended is dropped."""
        if output.index not in self._running:
            return
        if self._claim.prompt:
            self._client.forecast.begin(self._claim)
        self._claim.spend(len(output.token_ids))
        self._running[output.index] -= len(output.token_ids)
        if output.finish is not None:
            self._end(output.index)
        self._arrived.append(output)
        self._wake.set()

    def fail(self, death: EngineDead) -> None:
        """Nothing more will come."""
        self._death = death
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[list[TokenOutput]]:
        while self._running or self._arrived:
            await self._wake.wait()
            self._wake.clear()
            arrived, self._arrived = self._arrived, []
            if arrived:
                yield arrived
            if self._death is not None and self._running:
                raise self._death

    def stop(self, index: int) -> None:
        """See ``interface.TokenStream.stop``."""
        if index in self._running:
            self._client.send(Abort(self._request.request_id, index, "stop"))
            self._end(index)

    def close(self) -> None:
        """See ``interface.TokenStream.close``."""
        if self._running:
            self._client.send(Abort(self._request.request_id))
            for index in list(self._running):
                self._end(index)

    def _end(self, index: int) -> None:
        self._claim.spend(self._running.pop(index))
        self._client.unfinished -= 1
        if not self._running:
            self._client.forecast.remove(self._claim)
            self._client.forget(self._request.request_id)


class StreamingClient:
    """An engine client but for the transport: subclasses bring ``send`` and call ``receive``.

    All of it runs in one event loop.
    """

    def __init__(self) -> None:
        self.info: ModelInfo | None = None
        self.on_step: Callable[[StepStats], None] = lambda stats: None
        self._on_progress: Callable[[str], None] = lambda text: None
        self._streams: dict[str, Stream] = {}
        self._started: asyncio.Future[ModelInfo] | None = None
        self._death: asyncio.Future[str] | None = None
        self._last_step = time.monotonic()
        # Choices of all streams that still run.
        self.unfinished = 0
        self.forecast = Forecast()

    def send(self, message: ToEngine) -> None:
        """Hands a message to the engine; does nothing once it is dead."""
        raise NotImplementedError

    @property
    def unhealthy(self) -> str | None:
        """See ``interface.EngineClient.unhealthy``."""
        if self._death is not None and self._death.done():
            return f"the engine has ended: {self._death.result()}"
        if self.info is None:
            return "loading the model"
        stalled = time.monotonic() - self._last_step
        if self._streams and stalled > STALL_SECONDS:
            return f"no step for {stalled:.0f} s"
        return None

    def submit(self, request: Submit) -> Stream:
        """See ``interface.EngineClient.submit``."""
        if self.info is None or (self._death is not None and self._death.done()):
            raise EngineDead(self.unhealthy or "the engine is not ready")
        tokens = len(request.prompt) + request.params.max_tokens
        if tokens > self.info.max_context:
            why = self.info.shortage(tokens)
            raise PromptTooLong(
                f"prompt ({len(request.prompt)} tokens) and max_tokens "
                f"({request.params.max_tokens}) exceed the context of "
                f"{self.info.max_context} tokens" + (f": {why}" if why else "")
            )
        self.check_room(request.n, request.priority)
        if not self._streams:
            self._last_step = time.monotonic()  # an idle engine has not stalled
        claim = self.forecast.add(
            request.priority,
            request.arrival,
            len(request.prompt),
            request.n * request.params.max_tokens,
        )
        stream = self._streams[request.request_id] = Stream(request, self, claim)
        self.unfinished += request.n
        self.send(request)
        return stream

    def check_room(self, choices: int, priority: int) -> None:
        """See ``interface.EngineClient.check_room``."""
        if self.info is None:
            return
        room = self.info.max_rows + self.info.max_queue
        if self.unfinished + choices > room:
            wait = self._predicted_wait(priority, self.info.limits.ageing)
            raise QueueFull(
                f"{self.unfinished} requests are unfinished and {room} is the limit; one of "
                f"priority {priority} would wait for about {wait} s",
                wait,
            )

    def forget(self, request_id: str) -> None:
        """Drops a request that has ended."""
        self._streams.pop(request_id, None)

    async def died(self) -> str:
        """See ``interface.EngineClient.died``."""
        assert self._death is not None, "not started"
        return await asyncio.shield(self._death)

    def receive(self, message: FromEngine) -> None:
        """Takes a message from the engine."""
        assert self._started is not None
        match message:
            case StepOutput():
                self._last_step = time.monotonic()
                for output in message.outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:
                        stream.put(output)
                self._learn(message.stats)
                self.on_step(message.stats)
            case Loading():
                self._on_progress(message.text)
            case ModelInfo():
                self.info = message
                if not self._started.done():
                    self._started.set_result(message)
            case StartFailed():
                if not self._started.done():
                    self._started.set_exception(ModelError(message.message))

    def begin(self, on_progress: Callable[[str], None]) -> asyncio.Future[ModelInfo]:
        """What ``start`` has to wait for."""
        loop = asyncio.get_running_loop()
        self._on_progress = on_progress
        self._started = loop.create_future()
        self._death = loop.create_future()
        return self._started

    def end(self, why: str) -> None:
        """The engine has ended: everyone who waits for it learns why."""
        assert self._started is not None
        assert self._death is not None
        if self._death.done():
            return
        self._death.set_result(why)
        if not self._started.done():
            self._started.set_exception(EngineDead(why))
        for stream in list(self._streams.values()):
            stream.fail(EngineDead(why))
        self._streams.clear()

    def _learn(self, stats: StepStats) -> None:
        if stats.ended_seconds:
            self.forecast.rates.learn(
                stats.ended_prefill_tokens, stats.ended_rows, stats.ended_seconds
            )
        for choice in stats.finished:
            self.forecast.used(choice.generated_tokens, choice.max_tokens)

    def _predicted_wait(self, priority: int, ageing: float) -> int:
        """Whole seconds until it would be the turn of a request of this class that comes now."""
        wait = self.forecast.wait(priority, time.monotonic(), ageing)
        return math.ceil(min(max(wait, 1.0), MAX_RETRY_AFTER))
