"""The requests that the engine is working on, and what each of their sequences is sampled by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
from llguidance import LLMatcher

from chairlift.engine.core.checks import check_submit
from chairlift.engine.grammar.constraint import Constraint
from chairlift.engine.messages import FinishedChoice, FinishReason, Resumed, Submit
from chairlift.engine.sampling.sampler import SamplerRow, check_row
from chairlift.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """A submitted request with what is looked up for each of its tokens."""

    submit: Submit
    stop_ids: frozenset[int]

    def sampler_row(self, sequence: Sequence) -> SamplerRow:
        """How a choice samples: choice i of n by its own seed."""
        params = self.submit.params
        return SamplerRow(
            msgspec.structs.replace(params, seed=params.seed + sequence.index),
            sequence.tokens[: sequence.prompt_tokens],
            sequence.tokens[sequence.prompt_tokens :],
        )

    def constraint(self, matcher: LLMatcher | None) -> Constraint | None:
        """What a choice is held to, if to anything; ``matcher`` is its own."""
        params = self.submit.params
        held = params.grammar is not None or params.thinking is not None
        return Constraint(params, matcher) if held else None

    def finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why a sequence ends with the token just read, if it does."""
        if token in self.stop_ids:
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.max_total_tokens else None

    def finished(
        self, sequence: Sequence, reason: FinishReason, now: float
    ) -> Iterator[FinishedChoice]:
        """What the metrics learn of a sequence that ends, once for each choice it stands for."""
        for _ in range(0 if sequence.replay else len(sequence.choices)):
            yield FinishedChoice(
                reason=reason,
                prompt_tokens=sequence.prompt_tokens,
                generated_tokens=len(sequence.tokens) - sequence.prompt_tokens,
                max_tokens=sequence.max_tokens,
                n=self.submit.n,
                arrival=sequence.arrival,
                scheduled=sequence.scheduled_at,
                first_token=sequence.first_token_at,
                finished=now,
                cached_tokens=sequence.cached or 0,
            )


class Requests:
    """All unfinished requests by id; each is forgotten with the last of its choices.

    Args:
        vocabulary: token ids are below this.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._requests: dict[str, ActiveRequest] = {}
        self._choices: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, submit: Submit) -> list[Sequence]:
        """Registers a request and returns the sequences that stand for its choices: one for all,
        or, where they are resumed, one for each.

        Raises:
            ValueError: a number in it is out of its range.
            Exception: of any type; something that it brings into a step cannot be built.
        """
        check_submit(submit, self.vocabulary)
        request = ActiveRequest(submit, frozenset(submit.params.stop_token_ids))
        sequence = Sequence(
            request_id=submit.request_id,
            tokens=list(submit.prompt),
            max_tokens=submit.params.max_tokens,
            n=submit.n,
            arrival=submit.arrival,
            priority=submit.priority,
            cache_salt=submit.cache_salt,
            replay=submit.replay,
            prompt_logprobs=submit.prompt_logprobs,
            pooling=submit.pooling,
        )
        sequences = [_resume(sequence, choice) for choice in submit.resumed] or [sequence]
        self._check(request, sequences)
        self._requests[submit.request_id] = request
        self._choices[submit.request_id] = sum(len(sequence.choices) for sequence in sequences)
        return sequences

    def _check(self, request: ActiveRequest, sequences: list[Sequence]) -> None:
        """Builds alone what each sequence adds to a batch, where it would fail for all rows."""
        for sequence in sequences:
            check_row(request.sampler_row(sequence), self.vocabulary)

    def request_for(self, sequence: Sequence) -> ActiveRequest:
        """The request that a sequence belongs to."""
        return self._requests[sequence.request_id]

    def end(self, sequence: Sequence) -> None:
        """Counts a sequence's choices as finished."""
        request_id = sequence.request_id
        self._choices[request_id] -= len(sequence.choices)
        if self._choices[request_id] == 0:
            del self._choices[request_id], self._requests[request_id]


def _resume(sequence: Sequence, choice: Resumed) -> Sequence:
    """A choice of the request that ``sequence`` stands for, which has its first tokens already."""
    begun = bool(choice.output)
    return replace(
        sequence,
        tokens=[*sequence.tokens, *choice.output],
        prompt_tokens=sequence.prompt_tokens,
        index=choice.index,
        forked=True,
        cached=choice.cached_tokens if begun else None,
        scheduled_at=choice.scheduled,
        first_token_at=choice.first_token,
        last_token_at=choice.last_token,
        chunks=[],
        # Told with the first token.
        prompt_logprobs=None if begun else sequence.prompt_logprobs,
    )
