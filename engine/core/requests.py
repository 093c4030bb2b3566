"""The engine's unfinished requests, and how their sequences are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
from llguidance import LLMatcher

from chairlift.engine.core.checks import check_submit
from chairlift.engine.grammar.constraint import Constraint
from chairlift.engine.lora.adapters import Adapters
from chairlift.engine.messages import FinishedChoice, FinishReason, Resumed, Submit
from chairlift.engine.messages.images import prompt_keys
from chairlift.engine.sampling.sampler import SamplerRow, check_row
from chairlift.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """A submitted request, with its stop tokens as a set for fast look-up."""

    submit: Submit
    stop_ids: frozenset[int]

    def sampler_row(self, sequence: Sequence) -> SamplerRow:
        """The sampling parameters of a choice; each choice has its own seed."""
        params = self.submit.params
        return SamplerRow(
            msgspec.structs.replace(params, seed=params.seed + sequence.index),
            sequence.tokens[: sequence.prompt_tokens],
            sequence.tokens[sequence.prompt_tokens :],
        )

    def constraint(self, matcher: LLMatcher | None) -> Constraint | None:
        """The constraint of a choice, or None; ``matcher`` is the choice's own."""
        params = self.submit.params
        constrained = params.grammar is not None or params.thinking is not None
        return Constraint(params, matcher) if constrained else None

    def cut_at_end(
        self, sequence: Sequence, tokens: list[int]
    ) -> tuple[list[int], FinishReason | None]:
        """Drops tokens after the end of a sequence.

        Args:
            tokens: those just read, at least one.

        Returns:
            The tokens that belong to its output, and why it ends; None if it continues.
        """
        left = sequence.max_total_tokens - len(sequence.tokens)
        if len(tokens) < left and self.stop_ids.isdisjoint(tokens):
            return tokens, None
        for count, token in enumerate(tokens[:left], 1):
            if token in self.stop_ids:
                return tokens[:count], "stop"
        return tokens[:left], "length"

    def finish_records(
        self, sequence: Sequence, reason: FinishReason, now: float
    ) -> Iterator[FinishedChoice]:
        """Yields a record for the metrics for each choice of a sequence that ends."""
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
                last_token=sequence.last_token_at,
            )


class Requests:
    """All unfinished requests, by id. A request is removed when its last choice ends.

    Args:
        vocabulary: the last dimension of the logits; token ids are below it.
        adapters: the loaded LoRA adapters.
    """

    def __init__(self, vocabulary: int, adapters: Adapters) -> None:
        self.vocabulary = vocabulary
        self._adapters = adapters
        self._requests: dict[str, ActiveRequest] = {}
        self._choices: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, submit: Submit, uncut: tuple[range, ...] = ()) -> list[Sequence]:
        """Registers a request, and returns its sequences.

        A new request has one sequence, which stands for all its choices until its prompt is
        computed. A resumed request has one sequence for each choice.

        Args:
            uncut: see ``Sequence``.

        Raises:
            ValueError: a number in it is out of its range, or its adapter is not loaded.
            Exception: of any type; its part of a step cannot be built.
        """
        check_submit(submit, self.vocabulary)
        self._adapters.check(submit.adapter)
        request = ActiveRequest(submit, frozenset(submit.params.stop_token_ids))
        sequence = Sequence(
            request_id=submit.request_id,
            tokens=list(submit.prompt),
            max_tokens=submit.params.max_tokens,
            n=submit.n,
            arrival=submit.arrival,
            priority=submit.priority,
            cache_salt=self._adapters.salt(submit.adapter, submit.cache_salt),
            adapter=submit.adapter,
            replay=submit.replay,
            prompt_logprobs=submit.prompt_logprobs,
            pooling=submit.pooling,
            keys=prompt_keys(submit.prompt, submit.images, uncut) if submit.images else None,
            uncut=uncut,
        )
        sequences = [_resume(sequence, choice) for choice in submit.resumed] or [sequence]
        self._check(request, sequences)
        self._requests[submit.request_id] = request
        self._choices[submit.request_id] = sum(len(sequence.choices) for sequence in sequences)
        return sequences

    def _check(self, request: ActiveRequest, sequences: list[Sequence]) -> None:
        """Builds each sequence's sampling graph alone. In a batch, an error would hit all rows."""
        for sequence in sequences:
            check_row(request.sampler_row(sequence), self.vocabulary)

    def request_for(self, sequence: Sequence) -> ActiveRequest:
        """The request that a sequence belongs to."""
        return self._requests[sequence.request_id]

    def uses(self, adapter: str) -> bool:
        """Whether an unfinished request has this adapter."""
        return any(request.submit.adapter == adapter for request in self._requests.values())

    def count_finished(self, sequence: Sequence) -> None:
        """Counts a sequence's choices as finished."""
        request_id = sequence.request_id
        self._choices[request_id] -= len(sequence.choices)
        if self._choices[request_id] == 0:
            del self._choices[request_id], self._requests[request_id]


def _resume(sequence: Sequence, choice: Resumed) -> Sequence:
    """The sequence of a resumed choice; ``sequence`` is that of its request."""
    has_tokens = bool(choice.output)
    return replace(
        sequence,
        tokens=[*sequence.tokens, *choice.output],
        prompt_tokens=sequence.prompt_tokens,
        index=choice.index,
        forked=True,
        cached=choice.cached_tokens if has_tokens else None,
        scheduled_at=choice.scheduled,
        first_token_at=choice.first_token,
        last_token_at=choice.last_token,
        chunks=[],
        # These were sent with the first token.
        prompt_logprobs=None if has_tokens else sequence.prompt_logprobs,
    )
