"""Decides which replicas may have which requests after crashes: a suspect runs alone in one."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.engine.client.quarantine import Quarantine
from chairlift.engine.client.replica import Replica
from chairlift.engine.client.stream import Stream


class Isolation:
    """The quarantine of all replicas together.

    A suspect runs alone in one replica, the trial replica, while all other requests run in the
    others. So a request that brings engines down reaches two replicas at most.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._quarantine: Quarantine[Stream] = Quarantine()
        self.trial: Replica | None = None

    @property
    def active(self) -> bool:
        """Whether any request is watched."""
        return self._quarantine.active

    @property
    def alone(self) -> Stream | None:
        """The suspect that must run alone now; None if there is none."""
        return self._quarantine.alone

    def crashed(self, computing: Sequence[Stream], killed: bool) -> Stream | None:
        """See ``Quarantine.crashed``."""
        return self._quarantine.crashed(computing, killed)

    def update(self, fresh: Replica | None = None) -> None:
        """Clears requests that need no watching any more, and chooses the trial replica.

        Args:
            fresh: the replica that has just become ready, if one has.
        """
        self._quarantine.tidy()
        self.trial = self._trial_replica(fresh)

    def misplaced(self) -> list[tuple[Replica, Stream]]:
        """The requests in replicas that may not have them now."""
        if not self._quarantine.suspects:
            return []
        return [
            (replica, stream)
            for replica in self._replicas
            for stream in replica.streams
            if replica not in self.allowed(stream)
        ]

    def allowed(self, stream: Stream) -> list[Replica]:
        """The replicas that may have a request, whether they are ready or not."""
        alone = self.alone
        if alone is None:
            return list(self._replicas)
        if stream is alone:
            return [] if self.trial is None else [self.trial]
        if stream in self._quarantine.suspects:
            return []
        # With a single replica left, the others wait until its trial is over.
        return [replica for replica in self._replicas if replica is not self.trial]

    def _trial_replica(self, fresh: Replica | None) -> Replica | None:
        """The replica in which a suspect runs alone; None while there is no suspect.

        While a lost replica will be back, the trial waits for it: it has neither requests nor
        caches to lose. If it is the only one that serves, the other requests come first.
        """
        if self.alone is None:
            return None
        if self.trial is not None and self.trial.ready:
            return self.trial
        ready = [replica for replica in self._replicas if replica.ready]
        if any(not replica.ready and replica.dead is None for replica in self._replicas):
            return fresh if len(ready) > 1 else None
        return fresh or min(ready, key=lambda replica: replica.unfinished, default=None)
