"""An engine in a supervised child process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Literal, NamedTuple

from chairlift.engine.client.base import BaseEngineClient
from chairlift.engine.client.quarantine import Quarantine
from chairlift.engine.client.stream import Stream
from chairlift.engine.client.supervision import STEADY_SECONDS, Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.device.openmp import remove_abandoned_registrations
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.logs.setup import LogFormat
from chairlift.engine.messages import (
    FinishedChoice,
    FromEngine,
    Loading,
    ModelInfo,
    OnProgress,
    StartFailed,
    StepOutput,
    StepStats,
    ToEngine,
    Withdraw,
    silent,
)
from chairlift.engine.process.child import EngineProcess
from chairlift.engine.process.engine_process import Start
from chairlift.engine.process.folder import remove_abandoned

log = logging.getLogger(__name__)

# The time limits of a start and of a step are checked in this many parts. Only parts during which
# this process was awake count: when it wakes up, messages from the engine may still be unread.
TICKS = 20
# A process that cannot start sends the reason, then ends with code 0; its end may be seen first.
EXPLANATION_SECONDS = 5.0

RestartReason = Literal["crash", "hang", "start"]


class _End(NamedTuple):
    """The end of an engine process.

    Attributes:
        reason: "start" means that it ended before it was ready.
        description: for logs and messages: "the engine process ended with exit code 1".
        steady: it had served for longer than STEADY_SECONDS.
    """

    reason: RestartReason
    description: str
    steady: bool = False


class ProcessClient(BaseEngineClient):
    """An engine in a supervised child process.

    If the process dies or hangs, a new one is started, and unfinished requests resume in it with
    the tokens that they have so far.

    Args:
        environment: variables that the process gets in addition to those of this one.

    Attributes:
        on_restart: called with the reason before each restart. Settable.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        log_level: str = "info",
        log_format: LogFormat = "text",
        supervision: Supervision | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.on_restart: Callable[[RestartReason], None] = lambda reason: None
        self._start = Start(config, source, log_level, log_format)
        self._environment = environment or {}
        self._supervision = supervision or Supervision()
        self._quarantine: Quarantine[Stream] = Quarantine()
        self._engine: EngineProcess | None = None
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        # The end of the last process, in words.
        self._last_end = ""
        # The current process's message if it could not start.
        self._start_error: str | None = None
        self._first_start: float | None = None
        self._served_since = 0.0
        self._withdrawals = count(1)

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while there is no process."""
        return self._engine.pid if self._engine else None

    @property
    def unhealthy(self) -> str | None:
        """See ``interface.EngineClient.unhealthy``."""
        if self.info is not None and self.dead is None and not self._ready.is_set():
            return f"the engine is being restarted: {self._last_end}"
        return super().unhealthy

    async def start(self, on_progress: OnProgress = silent) -> ModelInfo:
        """See ``interface.EngineClient.start``."""
        remove_abandoned()
        remove_abandoned_registrations()
        started = self.begin(on_progress)
        self._supervisor = asyncio.create_task(self._supervise())
        return await started

    def send(self, message: ToEngine) -> None:
        """See ``BaseEngineClient.send``."""
        if self._engine is not None and self._ready.is_set():
            self._engine.send(message)

    async def stop(self) -> None:
        """See ``interface.EngineClient.stop``."""
        self._stopping.set()
        if self._engine is not None:
            if not self._ready.is_set():
                self._engine.kill()  # a loading engine reads no messages and has nothing to save
            await self._engine.stop()
        if self._supervisor is not None:
            await self._supervisor

    def receive(self, message: FromEngine) -> None:
        """See ``BaseEngineClient.receive``."""
        super().receive(message)
        match message:
            case ModelInfo():
                self._begin_serving(message)
            case StepOutput():
                self._arrange()
            case StartFailed():
                self._start_error = message.message

    def admit(self, stream: Stream) -> None:
        """See ``BaseEngineClient.admit``; without an engine that may have it, the stream waits."""
        if not self._ready.is_set():
            self.record(StepStats(waiting=self.unfinished))  # there is no step to report it
        elif self._quarantine.admits(stream):
            super().admit(stream)

    def forget(self, request_id: str) -> None:
        """See ``BaseEngineClient.forget``."""
        super().forget(request_id)
        self._arrange()

    def report(self, choices: list[FinishedChoice]) -> None:
        """See ``BaseEngineClient.report``; reports at once while there are no steps."""
        super().report(choices)
        if choices and not self._ready.is_set():
            self.record(StepStats(waiting=self.unfinished))

    async def _supervise(self) -> None:
        """Runs one engine process after the other."""
        failures = early = 0
        why = "it was stopped"
        try:
            while not self._stopping.is_set():
                end = await self._run()
                why = self._last_end = end.description
                if self._stopping.is_set() or (self._start_error and self.info is None):
                    break
                failures = failures + 1 if end.reason == "start" else 0
                early = 0 if end.steady else early + 1
                if failures == self._supervision.attempts:
                    why = f"{why}; it was started {failures} times in vain"
                    break
                await self._pause(end, failures, self._supervision.delay(early))
        except Exception as error:  # a bug here: waiting requests must still end
            log.error("the engine's supervision has failed: %s", redacted_traceback(error))
            why = f"supervising it failed: {type(error).__name__}"
        finally:
            self.end(why)

    async def _run(self) -> _End:
        """Runs one engine process from its start to its end."""
        began = time.monotonic()
        self._start_error = None
        try:
            engine = self._engine = EngineProcess(self.receive)
        except OSError as error:
            return _End("start", f"the engine process cannot be started: {error}")
        try:
            try:
                await engine.spawn(self._start, self._environment)
            except OSError as error:
                return _End("start", f"the engine process cannot be started: {error}")
            except UnicodeEncodeError as error:
                self._start_error = f"{error.object!r}: this name is not UTF-8; rename it"
                return _End("start", self._start_error)
            if self._stopping.is_set():
                engine.kill()
            ended = asyncio.create_task(engine.ended())
            watch = asyncio.create_task(self._watch(began))
            await asyncio.wait({ended, watch}, return_when=asyncio.FIRST_COMPLETED)
            hangs = watch.done() and not ended.done()
            watch.cancel()
            if hangs:
                engine.kill()
            code = await ended
            if code == 0:
                await self._await_explanation()
            cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            cause = f"hung: {watch.result()}" if hangs else f"ended with {cause}"
            description = f"the engine process {cause}"
            if not self._ready.is_set():
                return _End("start", self._start_error or description)
            self._ready.clear()
            if not self._stopping.is_set():
                self._requeue_after_crash(engine, killed=code == -signal.SIGKILL)
            steady = time.monotonic() - self._served_since > STEADY_SECONDS
            return _End("hang" if hangs else "crash", description, steady)
        finally:
            self._engine = None
            engine.kill()
            engine.close()

    async def _await_explanation(self) -> None:
        """Waits for the message of a process that could not start: it may still be on its way."""
        deadline = time.monotonic() + EXPLANATION_SECONDS
        while not (self._ready.is_set() or self._stopping.is_set() or self._start_error):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.02)

    async def _watch(self, began: float) -> str:
        """Waits until the engine hangs; returns a description."""
        limit = self._supervision.start_limit(self._first_start)
        if limit is not None and not await self._becomes_ready(limit):
            return f"not ready after {limit:.0f} s"
        await self._ready.wait()
        if self._first_start is None:
            self._first_start = time.monotonic() - began
        silent_ticks = 0
        while silent_ticks < TICKS:
            before = self.last_step
            await asyncio.sleep(self._supervision.timeout / TICKS)
            idle = not any(stream.admitted for stream in self._streams.values())
            silent_ticks = 0 if idle or before != self.last_step else silent_ticks + 1
        return f"no step for {self._supervision.timeout:g} s"

    async def _becomes_ready(self, limit: float) -> bool:
        """Waits until the engine is ready, for at most ``limit`` seconds; returns whether it is."""
        for _ in range(TICKS):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), limit / TICKS)
                return True
        return False

    async def _pause(self, end: _End, failures: int, seconds: float) -> None:
        """Waits before the next start; returns early if the client is stopped."""
        attempt = f", attempt {failures + 1} of {self._supervision.attempts}" if failures else ""
        log.warning(
            "%s; starting another in %g s%s; %d choices wait",
            *(end.description, seconds, attempt, self.unfinished),
        )
        if self.info is None:
            self._on_progress(Loading(f"{end.description}; starting another{attempt}"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        if not self._stopping.is_set():
            self.on_restart(end.reason)

    def _requeue_after_crash(self, engine: EngineProcess, killed: bool) -> None:
        """Ends replays, and queues all other requests for the next engine."""
        for replay in [stream for stream in self._streams.values() if stream.replay]:
            replay.give_up("the engine died while it was computing this replay")
        scheduled = engine.computing
        computing = [s for s in self._streams.values() if s.request_id in scheduled]
        for stream in computing:
            stream.scheduled = stream.scheduled or scheduled[stream.request_id]
        for stream in self._streams.values():
            stream.admitted = False
        self.adapters.fail_loading("the engine ended while it loaded the adapter")
        self._resolve_crash(computing, killed)

    def _resolve_crash(self, computing: list[Stream], killed: bool) -> None:
        """Lets the quarantine decide about the requests that the engine was computing."""
        guilty = self._quarantine.crashed(computing, killed)
        self.record(StepStats(waiting=self.unfinished))
        if guilty is not None:
            convict(guilty)

    def _begin_serving(self, info: ModelInfo) -> None:
        """Admits the waiting requests to a new engine that is ready."""
        self._served_since = self.last_step = time.monotonic()
        for stream in list(self._streams.values()):
            if stream.tokens > info.max_context:
                stream.give_up(
                    f"the engine was restarted with room for {info.max_context} tokens, and this "
                    f"request may need {stream.tokens}"
                )
        self._ready.set()
        self.adapters.restore()
        self._admit_all()

    def _arrange(self) -> None:
        """After a crash, admits exactly the requests that the quarantine allows."""
        if not self._quarantine.active:
            return
        # Even without an engine: a request that has ended must not block the others later.
        self._quarantine.tidy()
        if self._ready.is_set():
            for stream in list(self._streams.values()):
                if stream.admitted and not self._quarantine.admits(stream):
                    self._withdraw(stream)
            self._admit_all()

    def _admit_all(self) -> None:
        for stream in self._streams.values():
            if not stream.admitted:
                self.admit(stream)

    def _withdraw(self, stream: Stream) -> None:
        """Removes a request from the engine; it waits here under a new name."""
        self._remove(stream)
        self._streams[stream.request_id] = stream

    def _remove(self, stream: Stream) -> None:
        """Removes a request from the engine and from this client, and renames it.

        The new name keeps outputs that are still on their way from being taken for outputs of the
        resumed request.
        """
        self.send(Withdraw(stream.request_id))
        del self._streams[stream.request_id]
        stream.admitted = False
        stream.rename(f"{stream.request_id}.{next(self._withdrawals)}")


def convict(guilty: Stream) -> None:
    """Ends a request that has brought its engine down."""
    log.error("request %s has brought the engine down again", guilty.request_id)
    guilty.give_up("the engine died twice while it was computing this request")
