"""Runs two steps at a time: a step is launched before the tokens of the previous step are read.

NOTE: the order in which the next step may be built and dispatched depends on how cache buffers are
written; see ``LaunchOrder`` here and the note in ``step``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from copy import copy
from enum import Enum

import mlx.core as mx

from chairlift.cache.swap.swap import Swap
from chairlift.engine.core.decode import DecodeBatch
from chairlift.engine.core.prefill import PrefillBatch
from chairlift.engine.core.prefix_cache import PrefixCache
from chairlift.engine.core.prepared_model import PreparedModel
from chairlift.engine.core.prompt_outputs import PromptOutputs
from chairlift.engine.core.stats import PhaseTimer, StepRecorder
from chairlift.engine.core.step import Step
from chairlift.engine.device.dispatch import CallerDispatch, Dispatcher
from chairlift.engine.grammar.constraints import Constraints
from chairlift.engine.model.drafted import DraftedBand
from chairlift.engine.model.lora_routing import Slot
from chairlift.engine.model.vision.encoder import ImageEncoder
from chairlift.scheduler.cost import Work
from chairlift.scheduler.plan import NO_WORK, Plan
from chairlift.scheduler.sequence import Sequence

_IN_CALLER = CallerDispatch()
# A device computes a prompt of this many tokens in less time than the host takes to build a step.
BRIEF_TOKENS = 64


class LaunchOrder(Enum):
    """The order of building, dispatching, and waiting for a step."""

    # Build, dispatch, wait for this step itself: the model computes while its graph is built.
    EAGER = "eager"
    # Build, wait for the previous step, dispatch: MLX writes in place only to buffers that nothing
    # else references.
    SEQUENTIAL = "sequential"
    # Build, dispatch, wait for the previous step: kernels write pages without MLX. Another thread
    # may dispatch.
    QUEUED = "queued"


class Pipeline:
    """Launches steps, and keeps the running one.

    For each step, call ``launch(plan)``, then ``finish()``. A plan with drafts needs the
    tokens of the step before: call ``finish_running()`` before it is made. Call
    ``wait_dispatched()`` before anything else that evaluates arrays, and ``complete()`` before
    adapters change: committing a draft may call the model again, with the slots of the step.

    Attributes:
        learn: called once for each step with its work and the seconds that it took. Settable.
    """

    def __init__(
        self,
        model: PreparedModel,
        batch: DecodeBatch,
        prefill: PrefillBatch,
        prompt_outputs: PromptOutputs,
        prefixes: PrefixCache,
        swap: Swap[Sequence],
        constraints: Constraints,
        recorder: StepRecorder,
        learn: Callable[[Work, float], None],
        images: ImageEncoder,
        dispatcher: Dispatcher,
    ) -> None:
        self.forward = model.forward
        self._adapters = model.adapters
        self._batch = batch
        self._prefill = prefill
        self._prompt_outputs = prompt_outputs
        self._prefixes = prefixes
        self._swap = swap
        self._constraints = constraints
        self._recorder = recorder
        self.learn = learn
        self._images = images
        if model.eager:
            self.order = LaunchOrder.EAGER
        else:
            self.order = LaunchOrder.QUEUED if batch.queued else LaunchOrder.SEQUENTIAL
        self._launch = {
            LaunchOrder.EAGER: self._launch_sequential,
            LaunchOrder.SEQUENTIAL: self._launch_sequential,
            LaunchOrder.QUEUED: self._launch_queued,
        }[self.order]
        queued = self.order is LaunchOrder.QUEUED
        self._dispatcher = dispatcher if queued else _IN_CALLER
        # The step whose tokens are read next, and the step launched after it.
        self.running = Step()
        self._launched = Step()
        # The work of these two steps; NO_WORK once the running one is computed.
        self._work = self._launched_work = NO_WORK
        # The rows of the step with drafts that is running.
        self._drafted: list[DraftedBand] = []
        # The time at which the last step was computed.
        self._computed_at = 0.0

    @property
    def reads_first(self) -> bool:
        """Whether the running step should be read before the next is planned.

        This is so if the device has nothing but a short prompt, whose first token would otherwise
        wait until the next step is built. The device idles meanwhile in either case.
        """
        brief = not self._work.rows and 0 < self._work.tokens <= BRIEF_TOKENS
        return self.order is LaunchOrder.QUEUED and brief and bool(self.running.rows)

    def launch(self, plan: Plan, timer: PhaseTimer) -> None:
        """Builds the step of a plan and hands it to the device."""
        if self._work == NO_WORK:
            self._computed_at = max(self._computed_at, timer.start)
        self._launched, self._launched_work = self._launch(plan, timer), plan.work

    def run_between(self, work: Callable[[], float], timer: PhaseTimer) -> float:
        """Runs work that needs the device between two steps, whose times do not include it.

        Returns:
            The result of ``work``.
        """
        timer.end("schedule")
        self.wait_dispatched()
        self._wait(timer)
        result = work()
        self._computed_at = time.monotonic()
        timer.end("encode")
        return result

    def finish(self, timer: PhaseTimer) -> Step:
        """Waits for the step before the launched one, and returns it.

        With ``LaunchOrder.EAGER`` this is the launched step itself, and afterwards no step is
        running.
        """
        timer.end("launch")
        self._wait(timer)
        previous, self.running = self.running, self._launched
        self._work = self._launched_work
        return self.finish_running(timer) if self.order is LaunchOrder.EAGER else previous

    def finish_running(self, timer: PhaseTimer) -> Step:
        """Waits for the launched step, and returns it; afterwards no step is running."""
        timer.end("launch")
        self.wait_dispatched()
        self._wait(timer)
        running, self.running = self.running, Step()
        return running

    def complete(self) -> None:
        """Waits until the launched step is computed and its drafts are committed."""
        self.wait_dispatched()
        self._wait(PhaseTimer({}))

    def _launch_sequential(self, plan: Plan, timer: PhaseTimer) -> Step:
        step = self._build(plan)
        timer.end("launch")
        self.running.release()
        self._wait(timer)
        return self._dispatch(step, timer)

    def _launch_queued(self, plan: Plan, timer: PhaseTimer) -> Step:
        if not self._only_builds(plan):
            self.wait_dispatched()
        step = self._build(plan)
        timer.end("launch")
        return self._dispatch(step, timer)

    def _dispatch(self, step: Step, timer: PhaseTimer) -> Step:
        """Dispatches a step, and its sampling afterwards if it still has logits.

        Constrained rows are sampled once their masks are known, which are made while the model call
        is dispatched. Before a step with drafts the device idles, so it gets the model call before
        the sampling is built.
        """
        self.wait_dispatched()
        constrained = step.logits is not None and self._constraints.constrains(step.rows)
        step.dispatch(self._dispatcher)
        masks = None
        if constrained:
            timer.end("launch")
            self._wait(timer)
            masks = self._constraints.masks(step.rows, step.drafts)
            timer.end("mask")
        sampled = None
        if step.logits is not None:
            sampled = self._batch.sample(step.logits, step.drafts, masks)
        if step.drafts:
            self.forward.build_ahead()
        if sampled is not None:
            step.sample(sampled, self._dispatcher)
        return step

    def wait_dispatched(self) -> None:
        """Waits until the launched step is dispatched; see ``Dispatcher.wait_dispatched``."""
        self._dispatcher.wait_dispatched()

    def _only_builds(self, plan: Plan) -> bool:
        """Whether nothing is evaluated while this plan's step is built.

        Then it may be built while the step before is still being dispatched. Prompts and rows that
        join may copy pages, and prefixes that are kept may send others to disk.
        """
        changes = plan.chunks or plan.joins or plan.ends or plan.preempted or plan.drafts
        keeps = plan.leaves and self._prefixes.active
        return not (changes or keeps or self._batch.joining)

    def _wait(self, timer: PhaseTimer) -> None:
        """Waits until the running step is computed.

        The first call for a step also commits its drafts, passes its duration to ``learn``, and
        advances the constraints of its rows by their tokens.
        """
        running = self.running
        running.wait()
        if self._work != NO_WORK:
            accepted = 0
            if running.drafts:
                outcomes = running.outcomes
                accepted = sum(map(len, outcomes)) - len(outcomes)
                self._batch.commit_drafts(self._drafted, outcomes, self.forward.commit)
                self._drafted = []
            now = time.monotonic()
            seconds, self._computed_at = now - self._computed_at, now
            self.learn(self._work, seconds)
            stats = self._recorder.current
            stats.ended_prefill_tokens = self._work.tokens
            stats.ended_rows = self._work.rows
            stats.ended_tokens = self._work.rows + accepted
            stats.ended_seconds = seconds
            self._work = NO_WORK
            if self._constraints.constrains(running.rows):
                self._constraints.advance(zip(running.rows, running.outcomes, strict=True))
        timer.end("wait")

    def _build(self, plan: Plan) -> Step:
        """Builds a plan's graph: rows leave and join, prompt chunks, a token for each row."""
        now = time.monotonic()
        for sequence in (*plan.chunks, *plan.joins, *plan.ends):
            sequence.scheduled_at = sequence.scheduled_at or now
        for sequence, tokens in plan.chunks.items():
            if sequence.first_token_at is None:
                sequence.chunks.append((now, tokens))
        for choice, parent in (*plan.joins.items(), *plan.ends.items()):
            # The choice was forked when this step was planned, before its last chunk was noted.
            choice.chunks = list(parent.chunks)
        self._recorder.begin(plan)
        batch, prefixes = self._batch, self._prefixes
        self._swap_out(plan.preempted)
        # NOTE: this comes before ``keep``, which may evict the prefixes that the plan begins with.
        states = self._prefill.begin(plan)
        if prefixes.active:
            for sequence, band, row in batch.places_of(plan.leaves):
                if not self._swap.covers(sequence):
                    prefixes.keep(sequence, band, row)
        before_dispatch = self._move_rows(plan)
        chunks = self._prefill.chunks(plan, states)
        del states
        self._constraints.join(plan.joins)
        adapters = self._row_adapters()
        if plan.drafts:
            self._drafted = batch.begin_drafts(plan.drafts, adapters)
            fed = [token for band in self._drafted for row in band.rows for token in row]
            fed_tokens = mx.array(fed, mx.int32)
        else:
            fed_tokens = batch.tokens
        outcome = self.forward(
            *(batch.bands, fed_tokens, chunks, adapters, self._drafted), self._row_shifts()
        )
        for sequence in (*plan.joins.values(), *plan.ends.values()):
            self._images.computed(sequence.request_id)
        logits = outcome.logits
        prompt_arrays = self._prompt_outputs.take(plan, chunks, outcome)
        batch.joining = self._prefill.states(plan)
        rows = list(batch.rows)
        drafts = [plan.drafts.get(sequence, ()) for sequence in rows] if plan.drafts else []
        queued = self.order is LaunchOrder.QUEUED
        later = self._constraints.constrains(rows) or (queued and bool(drafts))
        sampled = None if logits is None or later else batch.sample(logits, drafts)
        # NOTE: copy the array handles. MLX updates arrays in place, so waiting on the originals
        # would also run the next step.
        side_effects = [copy(array) for chunk in chunks for array in chunk.cache.state]
        side_effects += [*prompt_arrays, *prefixes.take_pending(), *batch.states]
        return Step(
            rows=rows,
            drafts=drafts,
            sampled=sampled,
            logits=logits if later else None,
            before_dispatch=before_dispatch,
            side_effects=side_effects,
            queued=queued,
            computed=[*plan.decode, *plan.chunks],
            prompt_only=list(plan.ends),
            prompt_outputs=self._prompt_outputs.ended(plan),
        )

    def _swap_out(self, preempted: Seq[Sequence]) -> None:
        """Keeps the states of preempted sequences, if there is room.

        NOTE: no state may be referenced afterwards: its pages are free only then.
        """
        for sequence in preempted:
            state = self._prefill.state(sequence) or self._batch.state(sequence)
            self._swap.put(sequence, sequence.tokens, state)

    def _row_adapters(self) -> list[Slot]:
        """The slot of the adapter of each row in the caches; empty if no adapter is loaded."""
        if not len(self._adapters):
            return []
        rows = self._batch.rows[: self._batch.cached_rows]
        return [self._adapters.slot(sequence.adapter) for sequence in rows]

    def _row_shifts(self) -> list[int]:
        """The shift of each cached row's position by images before it; empty if no row has one."""
        if not len(self._images):
            return []
        rows = self._batch.rows[: self._batch.cached_rows]
        images = [self._images.images_of(sequence.request_id) for sequence in rows]
        shifts = [0 if each is None else each.shift for each in images]
        return shifts if any(shifts) else []

    def _move_rows(self, plan: Plan) -> list[mx.array]:
        """Changes the batch's rows to a plan's; returns arrays to evaluate before the dispatch."""
        batch = self._batch
        arrays = [*self._prefixes.take_pending(), *self._swap.pending]
        if arrays:
            self.wait_dispatched()
            mx.async_eval(arrays)
        if plan.capacities != batch.capacities:
            # Wait first: pending copies keep the old buffers of all layers in memory.
            mx.eval(arrays)
        arrays += batch.apply_plan(plan)
        if self.order is LaunchOrder.EAGER:
            mx.eval(arrays)
        return arrays
