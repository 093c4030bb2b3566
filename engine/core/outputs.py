"""Converts the results of a computed step to token outputs, and ends finished sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from chairlift.engine.core.background import Background
from chairlift.engine.core.failures import fail_sequence, refusal_outputs, refusal_records
from chairlift.engine.core.requests import Requests
from chairlift.engine.core.stats import StepRecorder
from chairlift.engine.core.step import Step
from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.constraints import Constraints
from chairlift.engine.grammar.pending import Grammars
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.messages import (
    FinishReason,
    PrefillTimes,
    Submit,
    TokenLogprobs,
    TokenOutput,
)
from chairlift.engine.sampling.outcomes import tokens_of
from chairlift.engine.sampling.readout import cut, read_logprobs
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence

log = logging.getLogger(__name__)


class Outputs:
    """Reads steps, and ends sequences that are finished, are aborted, or have failed.

    Args:
        background: is informed of each sequence that ends.
        on_end: called with each sequence that ends.
    """

    def __init__(
        self,
        requests: Requests,
        scheduler: Scheduler,
        constraints: Constraints,
        grammars: Grammars,
        recorder: StepRecorder,
        background: Seq[Background],
        on_end: Callable[[Sequence], None],
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._constraints = constraints
        self._grammars = grammars
        self._recorder = recorder
        self._background = background
        self._on_end = on_end
        # The last outputs of failed choices, which the next ``read`` returns.
        self._failed: list[TokenOutput] = []

    @property
    def pending(self) -> bool:
        """Whether the next ``read`` has failures to return."""
        return bool(self._failed)

    def read(self, step: Step) -> list[TokenOutput]:
        """Reads a computed step's tokens, ends finished sequences, and adds outputs of failures."""
        now = time.monotonic()
        logprobs = read_logprobs(None if step.sampled is None else step.sampled.logprobs)
        drafts = step.drafts or [()] * len(step.rows)
        results = list(zip(step.rows, step.outcomes, drafts, step.starts, strict=True))
        results += [(sequence, [], (), 0) for sequence in step.prompt_only]
        outputs = []
        constrained = self._constraints.constrains(step.rows)
        # NOTE: this runs for each row of each step, while the device may wait for the host.
        for sequence, outcomes, draft, start in results:
            if sequence.finished:
                continue
            try:
                tokens = tokens_of(outcomes, self._requests.vocabulary)
                output = self._output(sequence, tokens, now, constrained)
                if logprobs:
                    self._add_logprobs(sequence, output, logprobs, start)
                if draft:
                    self._count_draft(sequence, output, len(draft), len(outcomes) - 1)
                if sequence in step.prompt_outputs:
                    step.prompt_outputs[sequence].add_to(output)
                if output.finish is not None:
                    self.finish(sequence, output.finish)
                outputs.append(output)
            except Exception as error:  # of any type: the other rows must get their tokens
                self.fail(sequence, error)
        outputs += self._failed
        self._failed = []
        return outputs

    def refuse(self, request: Submit, error: Exception) -> None:
        """Ends a request that could not be queued."""
        log.error("request %s cannot be served: %s", request.request_id, redacted_traceback(error))
        self._failed += refusal_outputs(request, error)
        self._recorder.current.finished += refusal_records(request, time.monotonic())

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """Ends a sequence whose part of a step has failed."""
        grammar = self._requests.request_for(sequence).submit.params.grammar
        if grammar is not None and isinstance(error, GrammarError):
            self._grammars.forget(grammar)
        self._failed += fail_sequence(sequence, error, self._recorder.current)
        self.finish(sequence, "error")

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence and reports it to the metrics."""
        request = self._requests.request_for(sequence)
        finished = request.finish_records(sequence, reason, time.monotonic())
        self._recorder.current.finished.extend(finished)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from all parts of the engine without reporting it."""
        self._on_end(sequence)
        self._scheduler.finish(sequence)
        self._requests.count_finished(sequence)
        self._constraints.drop(sequence)
        last = sequence.request_id not in self._requests
        for work in self._background:
            work.drop(sequence, last)

    def _output(
        self, sequence: Sequence, tokens: list[int], now: float, constrained: bool
    ) -> TokenOutput:
        """The output for one row's tokens; without tokens, for a request that is only a prompt.

        Args:
            constrained: the sequence may have a constraint.
        """
        first = sequence.first_token_at is None
        request = self._requests.request_for(sequence)
        reason: FinishReason | None = "length"
        if tokens:
            tokens, reason = request.cut_at_end(sequence, tokens)
            self._scheduler.read(sequence, tokens)
            self._time_tokens(sequence, len(tokens), now)
            if constrained and self._constraints.complete(sequence):
                reason = "stop"
        output = TokenOutput(sequence.request_id, sequence.index, tokens, None, reason)
        if first:
            output.cached_tokens = sequence.cached or 0
            output.prefill_times = PrefillTimes(sequence.chunks, now)
        if reason is not None:
            output.ended_by_token = bool(tokens) and tokens[-1] in request.stop_ids
        return output

    def _add_logprobs(
        self,
        sequence: Sequence,
        output: TokenOutput,
        logprobs: Mapping[int, TokenLogprobs],
        start: int,
    ) -> None:
        """Adds the log-probabilities of an output's tokens, if they are requested.

        Args:
            logprobs: those of the step, by line.
            start: the line of the output's first token.
        """
        requested = self._requests.request_for(sequence).submit.params.logprobs
        lines = range(start, start + len(output.token_ids))
        if requested is not None and lines:
            output.logprobs = [cut(logprobs[line], requested) for line in lines]

    def _count_draft(
        self, sequence: Sequence, output: TokenOutput, proposed: int, right: int
    ) -> None:
        """Adds a draft to its sequence's output and to the metrics.

        Args:
            proposed: its number of tokens.
            right: how many of them are right; the output may have ended before the last of these.
        """
        output.accepted = min(right, len(output.token_ids))
        output.rejected = proposed - output.accepted
        if not sequence.replay:
            self._recorder.count_draft(proposed, output.accepted)

    def _time_tokens(self, sequence: Sequence, count: int, now: float) -> None:
        last, sequence.last_token_at = sequence.last_token_at, now
        if last is None:
            sequence.first_token_at = sequence.first_token_at or now
        if sequence.replay:
            return
        stats = self._recorder.current
        stats.output_tokens += count
        if last is None:
            stats.first_token_latencies.append(now - sequence.arrival)
        else:
            stats.inter_token_latencies.append(now - last)
