"""One of several engines of the same model: a supervised process that keeps no waiting requests."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

import msgspec

from chairlift.engine.client.placement import ReplicaPlace
from chairlift.engine.client.process_client import ProcessClient
from chairlift.engine.client.stream import Stream
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.setup import LogFormat
from chairlift.engine.messages import ModelInfo, StepStats


class ReplicaOwner(Protocol):
    """The owner of all replicas: it places requests, also those that a replica has lost."""

    def lost(self, replica: Replica, computing: list[Stream], killed: bool) -> None:
        """Takes a replica's requests (``Replica.release``) after its engine has ended.

        Args:
            computing: the requests that it was computing.
            killed: the process may have been killed from outside.
        """
        ...

    def ready(self, replica: Replica) -> None:
        """A replica's engine is ready, for the first time or again."""
        ...

    def ended(self, replica: Replica, stream: Stream) -> None:
        """A request has ended in a replica, which may keep its prompt and output as a prefix."""
        ...

    def arrange(self) -> None:
        """A request has ended or made progress, so that the quarantine may have changed."""
        ...


class Replica(ProcessClient):
    """A supervised engine process that gives its requests back when the process ends.

    Attributes:
        number: counts the replicas from 0.
        place: its device and its part of the host.
    """

    def __init__(
        self,
        number: int,
        place: ReplicaPlace,
        source: ModelSource,
        log_level: str,
        log_format: LogFormat,
        supervision: Supervision,
        owner: ReplicaOwner,
    ) -> None:
        super().__init__(
            place.config, source, log_level, log_format, supervision, place.environment
        )
        self.number = number
        self.place = place
        self._owner = owner

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests; it may still be stalled (``unhealthy``)."""
        return self._ready.is_set()

    def share_memory(self, info: ModelInfo) -> None:
        """Gives the engine as much memory for its caches as the one with ``info`` has.

        Later starts keep these sizes: what they would measure depends on the other replicas.
        """
        config = replace(
            self._start.config,
            kv_memory=info.kv_limit_bytes,
            prefix_cache_bytes=info.prefix_bytes,
        )
        self._start = msgspec.structs.replace(self._start, config=config)

    def adopt(self, stream: Stream, uncomputed: int) -> None:
        """Takes a request, which has no other replica.

        Args:
            uncomputed: tokens of its prompt and output that the engine has to compute first.
        """
        if not self._streams:
            self.last_step = time.monotonic()  # an idle engine has not stalled
        stream.move(self, uncomputed)
        self._streams[stream.request_id] = stream
        self.admit(stream)

    def forget(self, request_id: str) -> None:
        """See ``BaseEngineClient.forget``."""
        if (stream := self._streams.get(request_id)) is not None:
            self._owner.ended(self, stream)
        super().forget(request_id)

    def withdraw(self, stream: Stream) -> None:
        """Removes a request from the engine; the caller places it elsewhere."""
        self._remove(stream)

    @property
    def streams(self) -> list[Stream]:
        """The requests that the engine has."""
        return list(self._streams.values())

    def release(self) -> list[Stream]:
        """Gives all requests back, after the engine has ended."""
        streams = self.streams
        self._streams.clear()
        return streams

    def _resolve_crash(self, computing: list[Stream], killed: bool) -> None:
        self.record(StepStats())
        self._owner.lost(self, computing, killed)

    def _begin_serving(self, info: ModelInfo) -> None:
        self.share_memory(info)
        super()._begin_serving(info)
        self._owner.ready(self)

    def _arrange(self) -> None:
        self._owner.arrange()
