"""The machine: plan a step, build it, wait for the one before, dispatch it, read the one before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace

import mlx.core as mx

from chairlift.cache.store.store import PrefixStore
from chairlift.cache.swap.swap import Swap
from chairlift.engine.core.decode import DecodeBatch
from chairlift.engine.core.phase_timer import Laps
from chairlift.engine.core.prefill import Prompts
from chairlift.engine.core.prefix_cache import Prefixes
from chairlift.engine.core.prepared_model import PreparedModel
from chairlift.engine.core.prompt_outputs import Readings
from chairlift.engine.core.requests import Requests
from chairlift.engine.core.stats import complete, count_begun
from chairlift.engine.core.step import Step
from chairlift.engine.failures import explained, failed, refusal, refused
from chairlift.engine.grammar.compiler import Compiler
from chairlift.engine.grammar.constraints import Constraints
from chairlift.engine.grammar.pending import Grammars
from chairlift.engine.logs.redacted_traceback import trace_of
from chairlift.engine.messages import (
    Abort,
    FinishReason,
    PrefillTimes,
    StepOutput,
    StepStats,
    Submit,
    TokenLogprobs,
    TokenOutput,
)
from chairlift.engine.sampling.outcomes import token_of
from chairlift.engine.sampling.readout import cut, read_logprobs
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.scheduler import NO_WORK, Plan, Scheduler
from chairlift.scheduler.sequence import Sequence

log = logging.getLogger(__name__)


class EngineCore:
    """One model, its batch, and everything that waits for it. Not thread-safe.

    Args:
        model: how to call the model, and its caches.
        limits: of the batch; without packed model calls it has one band only.
        prefix_bytes: memory that the prefix cache may use; 0 turns it off.
        store: keeps prefixes on disk.
        swap: keeps the states of preempted rows; None: they are computed again.
        compiler: of grammars; None: no request may have one.
    """

    def __init__(
        self,
        model: PreparedModel,
        limits: Limits,
        prefix_bytes: int = 0,
        store: PrefixStore | None = None,
        swap: Swap[Sequence] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        kinds, vocabulary = model.kinds, model.vocabulary
        self.forward = model.forward
        # Where bands do not share a model call, each would read all weights again.
        self.limits = limits = limits if self.forward.packs else replace(limits, bands=1)
        self.requests = Requests(vocabulary)
        # Told whose tokens are about to be computed, before any of that is done.
        self.on_compute: Callable[[list[Sequence]], None] = lambda sequences: None
        self.prefixes = Prefixes(kinds, prefix_bytes, store)
        cached = self.prefixes.cached if prefix_bytes else None
        self.swap: Swap[Sequence] = Swap(kinds, 0) if swap is None else swap
        self.grammars = Grammars(compiler)
        self.constraints = Constraints(
            vocabulary, lambda s: self.requests.of(s).constraint(self.grammars.matcher(s))
        )
        self.scheduler = Scheduler(limits, cached, self._fetching, self.swap.covers)
        self.prompts = Prompts(model.caches.prompts, self.prefixes, self.swap, limits)
        self.readings = Readings()
        self.batch = DecodeBatch(
            [model.caches.rows() for _ in range(limits.bands)],
            vocabulary,
            lambda sequence: self.requests.of(sequence).sampler_row(sequence),
        )
        self._eager = model.eager
        self._running = Step()
        # The work of the running step until it is there, and when the one before was.
        self._work = NO_WORK
        self._ended = 0.0
        self._stats = StepStats()
        # Of choices that failed alone, to be told with the next step.
        self._failed: list[TokenOutput] = []

    @property
    def idle(self) -> bool:
        """Nothing is left to compute, to read, or to report, unless the disk has to come first."""
        due = self.prefixes.due or self.swap.due or self.grammars.due
        told = self._stats.finished or self._failed
        return self.scheduler.idle and not (self._running.rows or told or due)

    def submit(self, request: Submit) -> None:
        """Queues a request. One that fails by itself ends with an error, and nobody else does."""
        try:
            self.grammars.begin(request)
            sequences = self.requests.add(request)
        except Exception as error:  # of any type: it lies in what this request asks for
            self.grammars.drop(request.request_id)
            self._refuse(request, error)
            return
        # NOTE: once: resumed choices share what they begin with, and what is fetched goes by it.
        self.prefixes.fetch(sequences[0])
        for sequence in sequences:
            self.scheduler.add(sequence)

    def on_due(self, wake: Callable[[], None]) -> None:
        """Has ``wake`` called, from other threads, whenever an idle engine may have work again."""
        self.prefixes.on_due(wake)
        self.swap.on_due(wake)
        self.grammars.on_due(wake)

    def close(self, timeout: float) -> None:
        """Keeps what outlives the process, for so many seconds at most."""
        self.swap.close()
        self.prefixes.close(timeout)

    def abort(self, abort: Abort) -> None:
        """Ends what an abort names; its rows leave with the next step. Unknown ids are ignored."""
        for sequence in self.scheduler.of(abort.request_id):
            if abort.index is None or not sequence.forked or sequence.index == abort.index:
                self._finish(sequence, abort.reason)

    def withdraw(self, request_id: str) -> None:
        """Takes out all of a request without reporting it. Unknown ids are ignored."""
        for sequence in self.scheduler.of(request_id):
            self._remove(sequence)

    def step(self) -> StepOutput:
        """Plans and dispatches a step, and reads the one before, whose tokens it returns."""
        lap = Laps(self._stats.phases)
        if self._work == NO_WORK:
            self._ended = lap.start
        self.prefixes.take_fetched()
        for sequence in self.swap.work():
            self.scheduler.waiting.set_aside(sequence)
        for request_id, error in self.grammars.take_failed().items():
            for sequence in self.scheduler.of(request_id):
                self._fail(sequence, error)
        plan = self.scheduler.plan(self.batch.capacities)
        self.on_compute([*self._running.computed, *plan.decode, *plan.chunks])
        lap.end("schedule")
        if self._eager:
            self._wait()
            lap.end("wait")
        step = self._build(plan)
        lap.end("launch")
        if not step.queued:
            self._running.release()
            self._wait()
            lap.end("wait")
        step.dispatch()
        if step.logits is not None:
            lap.end("launch")
            self._wait()
            lap.end("wait")
            masks = self.constraints.masks(step.rows)
            lap.end("mask")
            step.sample(self.batch.sample(step.logits, masks))
        self.scheduler.commit(plan)
        lap.end("launch")
        self._wait()
        lap.end("wait")
        outputs = self._read(self._running)
        self._running, self._work = step, plan.work
        self.swap.settle()
        lap.end("output")
        outputs += self._failed
        self._failed = []
        return StepOutput(outputs, self._report(plan, lap.total))

    def _wait(self) -> None:
        """Until the running step is there. The scheduler learns how long after the one before, and
        rows that are held to something go on.
        """
        self._running.wait()
        if self._work != NO_WORK:
            ended = time.monotonic()
            self.scheduler.learn(self._work, ended - self._ended)
            self._stats.ended_prefill_tokens = self._work.tokens
            self._stats.ended_rows = self._work.rows
            self._stats.ended_seconds = ended - self._ended
            self._ended, self._work = ended, NO_WORK
            running = self._running
            if self.constraints.constrains(running.rows):
                self.constraints.advance(zip(running.rows, running.outcomes, strict=True))

    def _build(self, plan: Plan) -> Step:
        """The graph of a plan: a chunk of prompts, rows that leave and join, a token for each."""
        now = time.monotonic()
        for sequence in (*plan.chunks, *plan.joins, *plan.ends):
            sequence.scheduled_at = sequence.scheduled_at or now
        for sequence, tokens in plan.chunks.items():
            if sequence.first_token_at is None:
                sequence.chunks.append((now, tokens))
        count_begun(self._stats, plan, self)
        for sequence in plan.preempted:
            state = self.prompts.state(sequence) or self.batch.state(sequence)
            self.swap.put(sequence, sequence.tokens, state)
        # First, since what is kept next may evict the prefixes that the plan begins with.
        chunks = self.prompts.chunks(plan)
        if self.prefixes.active:
            for sequence, band, row in self.batch.leaving(plan.decode):
                if not self.swap.covers(sequence):
                    self.prefixes.keep(sequence, band, row)
        first = [*self.prefixes.take_pending(), *self.swap.pending]
        mx.async_eval(first)
        if plan.capacities != self.batch.capacities:
            # Else they would keep the old buffers of all layers while the new ones are made.
            mx.eval(first)
        first += self.batch.arrange(plan.decode, plan.capacities, list(plan.joins))
        if self._eager:
            mx.eval(first)
        self.constraints.join(plan.joins)
        outcome = self.forward(self.batch.bands, self.batch.tokens, chunks)
        logits = outcome.logits
        read = self.readings.take(plan, chunks, outcome)
        self.batch.arriving = self.prompts.states(plan)
        rows = list(self.batch.rows)
        late = self.constraints.constrains(rows)
        sampled = None if logits is None or late else self.batch.sample(logits)
        # NOTE: an array that is written to stays the same object in Python: without a copy of the
        # handle, waiting for this step would compute what the next one writes.
        written = [copy(array) for chunk in chunks for array in chunk.cache.state]
        written += [*read, *self.prefixes.take_pending(), *self.batch.states]
        computed = [*plan.decode, *plan.chunks]
        ended, readings = list(plan.ends), self.readings.ended(plan)
        return Step(
            *(rows, sampled, logits if late else None, first, written, self.batch.queued),
            *(computed, ended, readings),
        )

    def _fetching(self, sequence: Sequence) -> bool:
        fetching = self.prefixes.fetching(sequence) or self.swap.fetching(sequence)
        return fetching or self.grammars.awaited(sequence)

    def _read(self, step: Step) -> list[TokenOutput]:
        """Reads a computed step's tokens and decides which sequences they end."""
        now = time.monotonic()
        logprobs = read_logprobs(None if step.sampled is None else step.sampled.logprobs)
        told = step.outcomes
        outputs = []
        for row, sequence in enumerate((*step.rows, *step.ended)):
            if sequence.finished:
                continue
            try:
                token = token_of(told[row], self.requests.vocabulary) if sequence.rows else None
                output = self._output(sequence, token, logprobs.get(row), now)
                if sequence in step.readings:
                    step.readings[sequence].tell(output)
                if output.finish is not None:
                    self._finish(sequence, output.finish)
                outputs.append(output)
            except Exception as error:  # of any type: the others have tokens of their own
                self._fail(sequence, error)
        return outputs

    def _output(
        self, sequence: Sequence, token: int | None, logprobs: TokenLogprobs | None, now: float
    ) -> TokenOutput:
        """What one row's token comes to, or the end of a prompt that no token was to follow."""
        new = sequence.first_token_at is None
        request = self.requests.of(sequence)
        reason: FinishReason | None = "length"
        if token is not None:
            self.scheduler.token(sequence, token)
            self._time_token(sequence, now)
            reason = request.finish_reason(sequence, token)
            if self.constraints.complete(sequence):
                reason = "stop"
        wanted = request.submit.params.logprobs
        return TokenOutput(
            sequence.request_id,
            sequence.index,
            [] if token is None else [token],
            None if wanted is None or logprobs is None else [cut(logprobs, wanted)],
            reason,
            token in request.stop_ids,
            cached_tokens=(sequence.cached or 0) if new else 0,
            begun=PrefillTimes(sequence.chunks, now) if new else None,
        )

    def _refuse(self, request: Submit, error: Exception) -> None:
        """Ends a request that could not be taken."""
        log.error("request %s cannot be served: %s", request.request_id, trace_of(error))
        self._failed += refusal(request, explained(error))
        self._stats.finished += refused(request, time.monotonic())

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        """Ends one choice whose own part of a step has failed."""
        self._failed += failed(sequence, error, self._stats)
        self._finish(sequence, "error")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        finished = self.requests.of(sequence).finished(sequence, reason, time.monotonic())
        self._stats.finished.extend(finished)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.swap.drop(sequence)
        self.requests.end(sequence)
        self.constraints.drop(sequence)
        if sequence.request_id not in self.requests:
            self.prefixes.drop(sequence.request_id)
            self.grammars.drop(sequence.request_id)

    def _time_token(self, sequence: Sequence, now: float) -> None:
        last, sequence.last_token_at = sequence.last_token_at, now
        sequence.first_token_at = sequence.first_token_at or now
        if sequence.replay:
            return
        if last is None:
            self._stats.first_token_latencies.append(now - sequence.arrival)
        else:
            self._stats.inter_token_latencies.append(now - last)

    def _report(self, plan: Plan, duration: float) -> StepStats:
        """Completes this step's stats and begins the next one's."""
        stats, self._stats = self._stats, StepStats()
        stats.duration = duration
        complete(stats, plan, self)
        return stats
