"""The common base of all engine clients: open requests, and delivery of tokens to streams."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from chairlift.engine.client.adapters import AdapterTable
from chairlift.engine.client.stream import Stream
from chairlift.engine.errors import EngineDead, ModelError, Overflow, PromptTooLong, QueueFull
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.messages import (
    Abort,
    AdapterFailed,
    AdapterLoaded,
    FinishedChoice,
    FromEngine,
    Loading,
    ModelInfo,
    OnProgress,
    StartFailed,
    StepOutput,
    StepStats,
    Submit,
    ToEngine,
    TokenOutput,
    silent,
)
from chairlift.scheduler.forecast import Forecast

log = logging.getLogger(__name__)

# Without a step for this long while requests are unfinished, the engine counts as stalled.
STALL_SECONDS = 60.0
# Upper bound of Retry-After: longer waits cannot be predicted, and asking again is cheap.
MAX_RETRY_AFTER = 600


class BaseEngineClient:
    """An engine client without a transport: subclasses implement ``send`` and call ``receive``.

    Everything runs in one event loop.

    Attributes:
        adapters: the engine's LoRA adapters.
    """

    def __init__(self) -> None:
        self.info: ModelInfo | None = None
        self.on_step: Callable[[StepStats], None] = lambda stats: None
        self._on_progress: OnProgress = silent
        self._streams: dict[str, Stream] = {}
        self._started: asyncio.Future[ModelInfo] | None = None
        self._death: asyncio.Future[str] | None = None
        # Time of the last step, or of the first request after the engine was idle.
        self.last_step = time.monotonic()
        self.forecast = Forecast()
        self._unreported: list[FinishedChoice] = []
        self.adapters = AdapterTable(
            lambda message: self.send(message),
            lambda: [stream.adapter for stream in self._streams.values()],
        )

    def send(self, message: ToEngine) -> None:
        """Sends a message to the engine; does nothing once it is dead."""
        raise NotImplementedError

    @property
    def dead(self) -> str | None:
        """Why the engine has ended permanently; None while it has not."""
        return self._death.result() if self._death is not None and self._death.done() else None

    @property
    def unhealthy(self) -> str | None:
        """See ``interface.EngineClient.unhealthy``."""
        if self.dead is not None:
            return f"the engine has ended: {self.dead}"
        if self.info is None:
            return "loading the model"
        stalled = time.monotonic() - self.last_step
        if self._streams and stalled > STALL_SECONDS:
            return f"no step for {stalled:.0f} s"
        return None

    @property
    def degraded(self) -> str | None:
        """See ``interface.EngineClient.degraded``."""
        return self.unhealthy

    @property
    def accepts(self) -> bool:
        """See ``interface.EngineClient.accepts``."""
        return self.info is not None and self.dead is None

    @property
    def unfinished(self) -> int:
        """See ``interface.EngineClient.unfinished``."""
        return sum(s.unfinished for s in self._streams.values() if not s.replay)

    def submit(self, request: Submit) -> Stream:
        """See ``interface.EngineClient.submit``."""
        if self.info is None or self.dead is not None:
            raise EngineDead(self.unhealthy or "the engine is not ready")
        tokens = len(request.prompt) + request.params.max_tokens
        if tokens > self.info.max_context:
            why = self.info.shortage(tokens)
            raise PromptTooLong(
                f"prompt ({len(request.prompt)} tokens) and max_tokens "
                f"({request.params.max_tokens}) exceed the context of "
                f"{self.info.max_context} tokens" + (f": {why}" if why else ""),
                Overflow(
                    len(request.prompt), max(0, self.info.max_context - request.params.max_tokens)
                ),
            )
        self.check_room(request.n, request.priority)
        if not self._streams:
            self.last_step = time.monotonic()  # an idle engine has not stalled
        claim = self.forecast.add(
            request.priority,
            request.arrival,
            len(request.prompt),
            request.n * request.params.max_tokens,
        )
        stream = self._streams[request.request_id] = Stream(request, self, claim)
        self.admit(stream)
        return stream

    def admit(self, stream: Stream) -> None:
        """Sends a stream's request to the engine."""
        stream.admitted = True
        self.send(stream.submission())

    def report(self, choices: list[FinishedChoice]) -> None:
        """Adds choices that ended without the engine to the stats of its next step."""
        self._unreported += choices

    def record(self, stats: StepStats) -> None:
        """Passes a step's stats to ``on_step``, with the choices reported in between."""
        stats.finished += self._unreported
        self._unreported = []
        try:
            self.on_step(stats)
        except Exception as error:  # an error in metrics must not end streams
            log.error("a step's statistics could not be taken: %s", redacted_traceback(error))

    def check_room(self, choices: int, priority: int) -> None:
        """See ``interface.EngineClient.check_room``."""
        if self.info is None:
            return
        limit = self.info.max_rows + self.info.max_queue
        if self.unfinished + choices > limit:
            wait = self._predicted_wait(priority, self.info.limits.ageing)
            raise QueueFull(
                f"{self.unfinished} requests are unfinished and {limit} is the limit; one of "
                f"priority {priority} would wait for about {wait} s",
                wait,
            )

    def forget(self, request_id: str) -> None:
        """Removes a request that has ended."""
        self._streams.pop(request_id, None)
        self.adapters.release()

    async def died(self) -> str:
        """See ``interface.EngineClient.died``."""
        assert self._death is not None, "not started"
        return await asyncio.shield(self._death)

    def receive(self, message: FromEngine) -> None:
        """Handles a message from the engine."""
        assert self._started is not None
        match message:
            case StepOutput():
                self.last_step = time.monotonic()
                self._deliver(message.outputs)
                self._learn(message.stats)
                self.record(message.stats)
            case Loading():
                self._on_progress(message)
            case ModelInfo():
                self.info = message
                if not self._started.done():
                    self._started.set_result(message)
            case AdapterLoaded() | AdapterFailed():
                self.adapters.receive(message)
            case StartFailed():
                if not self._started.done():
                    self._started.set_exception(ModelError(message.message))

    def begin(self, on_progress: OnProgress) -> asyncio.Future[ModelInfo]:
        """Prepares a start; returns the future that ``start`` awaits."""
        loop = asyncio.get_running_loop()
        self._on_progress = on_progress
        self._started = loop.create_future()
        self._death = loop.create_future()
        return self._started

    def end(self, why: str) -> None:
        """Marks the engine as ended; a pending start and all streams fail with ``why``."""
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
        self.adapters.close(why)

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        """Gives each output to its stream. A stream that fails is ended; the others continue."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            try:
                stream.put(output)
            except Exception as error:
                log.error("request %s has failed: %s", stream.request_id, redacted_traceback(error))
                self.send(Abort(stream.request_id))
                self.forget(stream.request_id)
                stream.fail(error)

    def _learn(self, stats: StepStats) -> None:
        if stats.ended_seconds:
            self.forecast.rates.learn(
                stats.ended_prefill_tokens, stats.ended_tokens, stats.ended_seconds
            )
        for choice in stats.finished:
            self.forecast.learn_output(choice.generated_tokens, choice.max_tokens)

    def _predicted_wait(self, priority: int, ageing: float) -> int:
        """Predicted seconds until a request of this class that arrives now would start."""
        wait = self.forecast.wait(priority, time.monotonic(), ageing)
        return math.ceil(min(max(wait, 1.0), MAX_RETRY_AFTER))
