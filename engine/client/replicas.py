"""Several engines of one model behind one interface."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from chairlift.engine.client.base import BaseEngineClient
from chairlift.engine.client.combined import Levels, combined_info
from chairlift.engine.client.isolation import Isolation
from chairlift.engine.client.placement import ReplicaPlace
from chairlift.engine.client.prefix_index import BLOCK, MAX_BLOCKS
from chairlift.engine.client.process_client import RestartReason, convict
from chairlift.engine.client.replica import Replica
from chairlift.engine.client.routing import ReplicaLoad, Router
from chairlift.engine.client.stream import Stream
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.setup import LogFormat
from chairlift.engine.messages import (
    FinishedChoice,
    Loading,
    ModelInfo,
    OnProgress,
    StepStats,
    ToEngine,
    silent,
)

log = logging.getLogger(__name__)

# Above this part of its KV memory, an engine whose requests wait has no further rows.
KV_FULL = 0.9


class ReplicaClient(BaseEngineClient):
    """Routes requests to the engines of one model. A lost engine's requests go to the others.

    A request is in exactly one replica, or here if none may have it: while all are being
    restarted, or while ``Isolation`` holds it back.

    Attributes:
        on_restart: called with the reason before each restart of a replica. Settable.
    """

    def __init__(
        self,
        places: Sequence[ReplicaPlace],
        source: ModelSource,
        log_level: str = "info",
        log_format: LogFormat = "text",
        supervision: Supervision | None = None,
    ) -> None:
        super().__init__()
        self.on_restart: Callable[[RestartReason], None] = lambda reason: None
        settings = (source, log_level, log_format, supervision or Supervision())
        self.replicas = [
            Replica(number, place, *settings, self) for number, place in enumerate(places)
        ]
        self._router = Router(len(places))
        self._levels = Levels(len(places))
        self._isolation = Isolation(self.replicas)
        self._placing = self._place_again = False
        self._end_watchers: list[asyncio.Task[None]] = []
        for replica in self.replicas:
            replica.on_step = partial(self._stepped, replica)
            replica.on_restart = self._restarts

    @property
    def unhealthy(self) -> str | None:
        """See ``interface.EngineClient.unhealthy``; one replica that serves is enough."""
        if self.dead is not None:
            return f"the engine has ended: {self.dead}"
        if self.info is None:
            return "loading the model"
        return None if any(r.unhealthy is None for r in self.replicas) else self.degraded

    @property
    def degraded(self) -> str | None:
        """See ``interface.EngineClient.degraded``."""
        reasons = ((r.number, r.unhealthy) for r in self.replicas)
        return "; ".join(f"replica {n}: {why}" for n, why in reasons if why is not None) or None

    @property
    def unfinished(self) -> int:
        """See ``interface.EngineClient.unfinished``."""
        return super().unfinished + sum(replica.unfinished for replica in self.replicas)

    async def start(self, on_progress: OnProgress = silent) -> ModelInfo:
        """See ``interface.EngineClient.start``.

        One replica on each device starts first: the memory that it finds is for all on the device.
        """
        self.begin(on_progress).cancel()  # this awaits the replicas instead
        try:
            await self._start_all(on_progress)
        except Exception:
            await self.stop()
            raise
        self._end_watchers = [asyncio.create_task(self._watch_end(r)) for r in self.replicas]
        self.info = self._combined()
        return self.info

    async def _start_all(self, on_progress: OnProgress) -> None:
        first: dict[str, Replica] = {}
        for replica in self.replicas:
            first.setdefault(replica.place.device, replica)
        others = [replica for replica in self.replicas if replica not in first.values()]
        shown, *hidden = first.values()
        await asyncio.gather(shown.start(on_progress), *(replica.start() for replica in hidden))
        if not others:
            return
        on_progress(Loading(f"starting {len(others)} more on the same device"))
        for replica in others:
            info = first[replica.place.device].info
            assert info is not None
            replica.share_memory(info)
        await asyncio.gather(*(replica.start() for replica in others))

    def send(self, message: ToEngine) -> None:
        """Does nothing: the requests that wait here are in no engine."""

    async def stop(self) -> None:
        """See ``interface.EngineClient.stop``."""
        for watcher in self._end_watchers:
            watcher.cancel()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
        if self._death is not None:
            self.end("it was stopped")

    def admit(self, stream: Stream) -> None:
        """Gives a waiting request to a replica, if one may have it now."""
        if not self._fits(stream):
            return
        candidates = self._candidates(stream)
        if not candidates:
            self._record_waiting()
            return
        request = stream.submission()
        expected = request.params.max_tokens * self.forecast.used_part
        loads = [self._load(replica, request.priority) for replica in candidates]
        number, hit = self._router.route(request, expected, loads)
        del self._streams[stream.request_id]
        self.replicas[number].adopt(stream, stream.uncomputed - hit)

    def forget(self, request_id: str) -> None:
        """See ``BaseEngineClient.forget``."""
        super().forget(request_id)
        self.arrange()

    def report(self, choices: list[FinishedChoice]) -> None:
        """See ``BaseEngineClient.report``; reports at once, because there are no steps here."""
        super().report(choices)
        if choices:
            self._record_waiting()

    def lost(self, replica: Replica, computing: list[Stream], killed: bool) -> None:
        """See ``ReplicaOwner.lost``."""
        self._router.forget(replica.number)
        for stream in replica.release():
            self._keep(stream)
        guilty = self._isolation.crashed(computing, killed)
        if guilty is not None:
            convict(guilty)
        self._place()

    def ready(self, replica: Replica) -> None:
        """See ``ReplicaOwner.ready``."""
        info = replica.info
        assert info is not None
        config, size = replica.place.config, info.prefix_bytes
        if config.prefix_cache_dir is not None:
            size += config.prefix_cache_dir_bytes
        # A model with recurrent layers only may keep no bytes for a token.
        blocks = (
            size // (info.kv_bytes_per_token * BLOCK) if info.kv_bytes_per_token else MAX_BLOCKS
        )
        self._router.resize(replica.number, blocks)
        if self.info is not None:  # else the others still start
            self.info = self._combined()
            self._place(replica)

    def ended(self, replica: Replica, stream: Stream) -> None:
        """See ``ReplicaOwner.ended``."""
        self._router.extend(replica.number, stream.request, stream.last_output)

    def arrange(self) -> None:
        """See ``ReplicaOwner.arrange``."""
        if self._isolation.active:
            self._place()

    def _place(self, fresh: Replica | None = None) -> None:
        """Moves requests to where they may be, and gives waiting ones a replica.

        Args:
            fresh: the replica that has just become ready, if one has.
        """
        self._place_again = True
        if self._placing:
            return  # a request has ended while others were placed, and may have released them
        self._placing = True
        try:
            while self._place_again:
                self._place_again = False
                self._isolation.update(fresh)
                self._place_once()
                fresh = None
        finally:
            self._placing = False

    def _place_once(self) -> None:
        for replica, stream in self._isolation.misplaced():
            replica.withdraw(stream)
            self._keep(stream)
        for stream in list(self._streams.values()):
            # Another may have ended it meanwhile.
            if self._streams.get(stream.request_id) is stream:
                self.admit(stream)

    def _keep(self, stream: Stream) -> None:
        """Lets a request that is in no replica wait here."""
        stream.move(self, stream.uncomputed)
        self._streams[stream.request_id] = stream

    def _candidates(self, stream: Stream) -> list[Replica]:
        """The replicas that may have a request now; those that are stalled only if all are."""
        ready = [r for r in self._isolation.allowed(stream) if r.ready and _holds(r, stream)]
        return [r for r in ready if r.unhealthy is None] or ready

    def _load(self, replica: Replica, priority: int) -> ReplicaLoad:
        """A replica's work ahead of a new request of this class."""
        assert replica.info is not None
        latest, rows = self._levels.latest(replica.number), replica.info.max_rows
        if latest.waiting and latest.kv_used_bytes > KV_FULL * latest.kv_limit_bytes:
            rows = max(1, latest.running)
        forecast = replica.forecast
        prompt, output = forecast.waiting_prompt(priority), forecast.expected_output
        return ReplicaLoad(replica.number, prompt, output, replica.unfinished, rows)

    def _fits(self, stream: Stream) -> bool:
        """Whether a replica has room for the request, now or later; ends it if none has."""
        alive = [replica for replica in self.replicas if replica.dead is None]
        if not alive or any(_holds(replica, stream) for replica in alive):
            return True
        assert self.info is not None
        stream.give_up(
            f"the engine was restarted with room for {self.info.max_context} tokens, and this "
            f"request may need {stream.tokens}"
        )
        return False

    def _combined(self) -> ModelInfo:
        alive = (replica.info for replica in self.replicas if replica.dead is None)
        return combined_info([info for info in alive if info is not None])

    def _stepped(self, replica: Replica, stats: StepStats) -> None:
        self._learn(stats)
        if stats.ended_seconds:
            self._router.speed.learn(
                stats.ended_prefill_tokens,
                stats.ended_rows,
                stats.ended_tokens,
                stats.ended_seconds,
            )
        self._levels.record(replica.number, stats)
        self.record(self._levels.summed(stats, super().unfinished))

    def _record_waiting(self) -> None:
        """Reports choices that wait here or have ended here, beside the replicas' own steps."""
        self.record(self._levels.summed(StepStats(), super().unfinished))

    def _restarts(self, reason: RestartReason) -> None:
        self.on_restart(reason)

    def _predicted_wait(self, priority: int, ageing: float) -> int:
        alive = [replica for replica in self.replicas if replica.dead is None]
        return min((r._predicted_wait(priority, ageing) for r in alive), default=1)

    async def _watch_end(self, replica: Replica) -> None:
        """Waits until a replica has ended permanently; the last one ends this client."""
        why = await replica.died()
        alive = [r for r in self.replicas if r.dead is None]
        if not alive:
            self.end(f"all {len(self.replicas)} replicas have ended; the last: {why}")
            return
        log.error(
            "replica %d has ended permanently: %s; %d of %d replicas are left",
            *(replica.number, why, len(alive), len(self.replicas)),
        )
        self.info = self._combined()
        self._place()


def _holds(replica: Replica, stream: Stream) -> bool:
    return replica.info is not None and stream.tokens <= replica.info.max_context
