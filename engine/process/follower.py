"""Replays rank 0's turns in another rank's engine core."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from chairlift.engine.core.background import NOTHING_NEW, Background, Collected
from chairlift.engine.core.core import EngineCore
from chairlift.engine.core.stats import PhaseTimer
from chairlift.engine.core.step import Step
from chairlift.engine.errors import EngineDead, RowFailed
from chairlift.engine.parallel.journal import (
    Ended,
    Event,
    Learned,
    ProposedDraft,
    Read,
    Ready,
    Submitted,
    Turn,
    digest,
)
from chairlift.engine.sampling.outcomes import tokens_of
from chairlift.scheduler.sequence import Sequence


class AwaitedRequests:
    """The ``Background`` of another rank: requests that wait for work which rank 0 alone does."""

    due = False

    def __init__(self) -> None:
        self.request_ids: set[str] = set()

    def on_due(self, wake: Callable[[], None]) -> None:
        """Rank 0's turns are all that wakes this rank."""

    def collect(self) -> Collected:
        return NOTHING_NEW

    def is_awaited(self, sequence: Sequence) -> bool:
        return sequence.request_id in self.request_ids

    def drop(self, sequence: Sequence, last: bool) -> None:
        if last:
            self.request_ids.discard(sequence.request_id)

    def close(self, timeout: float) -> None:
        """There is nothing to end."""


class Follower:
    """An engine core that does what rank 0's core does.

    It plans and computes the same steps. It learns from rank 0 how long they took, and which
    sequences have ended; the rest it derives.

    Args:
        make_core: makes the core, with further background work.
    """

    def __init__(self, make_core: Callable[[Background], EngineCore]) -> None:
        self._awaited = AwaitedRequests()
        self.core = make_core(self._awaited)
        # Only rank 0's measurements count.
        self.core.pipeline.learn = lambda work, seconds: None

    def take(self, turn: Turn) -> None:
        """Applies a turn's events, and runs the step that follows them.

        Raises:
            EngineDead: the step would be another than rank 0's.
        """
        for event in turn.events:
            self._apply(event)
        if turn.digest is not None:
            self._step(turn.digest, turn.drafts)

    def _apply(self, event: Event) -> None:
        core = self.core
        match event:
            case Submitted(request, awaited):
                if awaited:
                    self._awaited.request_ids.add(request.request_id)
                core.submit(request)
            case Ready(request_ids):
                self._awaited.request_ids.difference_update(request_ids)
            case Read():
                self._read(core.pipeline.finish_running(PhaseTimer({})))
            case Learned(work, seconds):
                core.scheduler.learn(work, seconds)
            case Ended(request_id, index, nonfinite):
                for sequence in core.scheduler.sequences_of(request_id):
                    if sequence.index == index:
                        sequence.nonfinite = nonfinite
                        core.outputs.remove(sequence)

    def _step(self, expected: int, drafts: Seq[ProposedDraft]) -> None:
        core = self.core
        sequences = {(s.request_id, s.index): s for s in core.scheduler.running if drafts}
        chosen = {sequences[draft.request_id, draft.index]: draft.tokens for draft in drafts}
        plan = core.scheduler.plan(core.batch.capacities, chosen)
        if digest(plan, core.cached_bytes) != expected:
            raise EngineDead("its plan differs from rank 0's")
        timer = PhaseTimer({})
        core.pipeline.launch(plan, timer)
        core.scheduler.commit(plan)
        self._read(core.pipeline.finish(timer))
        core.swap.move_to_host()

    def _read(self, step: Step) -> None:
        """Appends a computed step's tokens. Rank 0's next turn says which sequences have ended."""
        for sequence, outcomes in zip(step.rows, step.outcomes, strict=True):
            if sequence.finished:
                continue
            try:
                tokens = tokens_of(outcomes, self.core.requests.vocabulary)
            except RowFailed:
                continue
            self.core.scheduler.read(sequence, tokens)
