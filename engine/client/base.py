"""What the two engine clients have in common: the open requests, and who gets which tokens."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from chairlift.engine.client.stream import Stream
from chairlift.engine.errors import EngineDead, ModelError, Overflow, PromptTooLong, QueueFull
from chairlift.engine.logs.redacted_traceback import trace_of
from chairlift.engine.messages import (
    Abort,
    FinishedChoice,
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
from chairlift.scheduler.forecast import Forecast

log = logging.getLogger(__name__)

# No step for this long while requests are unfinished: something hangs.
STALL_SECONDS = 60.0
# However long the wait, it pays to ask again; nor can anybody foresee more than this.
MAX_RETRY_AFTER = 600


def silent(text: str) -> None:
    """Progress that nobody asked for."""


class BaseEngineClient:
    """An engine client but for the transport: subclasses bring ``send`` and call ``receive``.

    All of it runs in one event loop.
    """

    def __init__(self) -> None:
        self.info: ModelInfo | None = None
        self.on_step: Callable[[StepStats], None] = lambda stats: None
        self._on_progress: Callable[[str], None] = silent
        self._streams: dict[str, Stream] = {}
        self._started: asyncio.Future[ModelInfo] | None = None
        self._death: asyncio.Future[str] | None = None
        # When the engine was last heard of, or given work after it had none.
        self.last_step = time.monotonic()
        self.forecast = Forecast()
        self._unreported: list[FinishedChoice] = []

    def send(self, message: ToEngine) -> None:
        """Hands a message to the engine; does nothing once it is dead."""
        raise NotImplementedError

    @property
    def dead(self) -> str | None:
        """Why the engine has ended for good, if it has."""
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
    def accepts(self) -> bool:
        """See ``interface.EngineClient.accepts``."""
        return self.unhealthy is None

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
        """Hands a stream's request to the engine."""
        stream.admitted = True
        self.send(stream.submission())

    def report(self, choices: list[FinishedChoice]) -> None:
        """Tells the metrics of choices that ended without the engine: with its next step."""
        self._unreported += choices

    def record(self, stats: StepStats) -> None:
        """Hands a step's stats on, with what is to be reported beside them."""
        stats.finished += self._unreported
        self._unreported = []
        try:
            self.on_step(stats)
        except Exception as error:  # streams do not end because something is counted wrong
            log.error("a step's statistics could not be taken: %s", trace_of(error))

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
                self.last_step = time.monotonic()
                self._deliver(message.outputs)
                self._learn(message.stats)
                self.record(message.stats)
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

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        """Gives each output to its stream; one that fails is ended, and the others get theirs."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            try:
                stream.put(output)
            except Exception as error:
                log.error("request %s has failed: %s", stream.request_id, trace_of(error))
                self.send(Abort(stream.request_id))
                self.forget(stream.request_id)
                stream.fail(error)

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
