"""The requests that the engine is working on, and what each of their sequences is sampled by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from chairlift.engine.messages import FinishedChoice, FinishReason, Submit
from chairlift.engine.sampling.sampler import SamplerRow
from chairlift.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Request:
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

    def finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why a sequence ends with the token just read, if it does."""
        if token in self.stop_ids:
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.most else None

    def finished(
        self, sequence: Sequence, reason: FinishReason, now: float
    ) -> Iterator[FinishedChoice]:
        """What the metrics learn of a sequence that ends, once for each choice it stands for."""
        for _ in range(0 if sequence.replay else sequence.rows):
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
    """All unfinished requests by id; each is forgotten with the last of its choices."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._choices: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, submit: Submit) -> Sequence:
        """Registers a request and returns the sequence that stands for its choices."""
        self._requests[submit.request_id] = Request(submit, frozenset(submit.params.stop_token_ids))
        self._choices[submit.request_id] = submit.n
        return Sequence(
            request_id=submit.request_id,
            tokens=list(submit.prompt),
            max_tokens=submit.params.max_tokens,
            n=submit.n,
            arrival=submit.arrival,
            priority=submit.priority,
            cache_salt=submit.cache_salt,
            replay=submit.replay,
        )

    def of(self, sequence: Sequence) -> Request:
        """The request that a sequence belongs to."""
        return self._requests[sequence.request_id]

    def end(self, sequence: Sequence) -> None:
        """Counts a sequence's choices as finished."""
        request_id = sequence.request_id
        self._choices[request_id] -= sequence.rows
        if self._choices[request_id] == 0:
            del self._choices[request_id], self._requests[request_id]
