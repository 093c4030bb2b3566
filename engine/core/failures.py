"""Builds the final outputs and the metrics of choices that fail on their own."""

from __future__ import annotations

import logging

from chairlift.engine.errors import GrammarError, RequestError, RowFailed
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.messages import FinishedChoice, StepStats, Submit, TokenOutput
from chairlift.scheduler.sequence import Sequence

log = logging.getLogger(__name__)

_NONFINITE = ("nonfinite_logits", "nonfinite_hidden")


def _explained(error: BaseException) -> str:
    """One line about an exception, for the client whose request fails."""
    text = " ".join(str(error).split())
    if isinstance(error, GrammarError):
        return f"the output cannot follow this request's grammar: {text}"
    if isinstance(error, RequestError):
        return text
    if isinstance(error, RowFailed):
        return f"this request failed in the engine: {text}"
    return f"this request failed in the engine: {type(error).__name__}" + (f": {text}" * bool(text))


def fail_sequence(sequence: Sequence, error: BaseException, stats: StepStats) -> list[TokenOutput]:
    """Logs and counts a sequence whose part of a step has failed; returns its last outputs."""
    # Messages of other errors may quote a user.
    text = str(error) if isinstance(error, RowFailed) else redacted_traceback(error)
    log.error("request %s has failed: %s", sequence.request_id, text)
    reason = _reason(error)
    sequence.nonfinite = reason in _NONFINITE
    stats.rows_failed[reason] = stats.rows_failed.get(reason, 0) + len(sequence.choices)
    return [_last(sequence.request_id, index, error) for index in sequence.choices]


def _reason(error: BaseException) -> str:
    """The error's label in the metric ``chairlift_rows_failed``."""
    if isinstance(error, RowFailed):
        return error.reason
    return "grammar" if isinstance(error, GrammarError) else "other"


def _last(request_id: str, index: int, error: BaseException) -> TokenOutput:
    return TokenOutput(
        request_id,
        index,
        [],
        finish="error",
        error=_explained(error),
        client_error=isinstance(error, GrammarError | RequestError),
    )


def refusal_outputs(request: Submit, error: BaseException) -> list[TokenOutput]:
    """The outputs of a request that the engine cannot accept."""
    return [_last(request.request_id, index, error) for index in _choices(request)]


def refusal_records(request: Submit, now: float) -> list[FinishedChoice]:
    """The records of a refused request's choices, for the metrics."""
    return [
        FinishedChoice(
            reason="error",
            prompt_tokens=len(request.prompt),
            generated_tokens=len(output),
            max_tokens=request.params.max_tokens,
            n=request.n,
            arrival=request.arrival,
            scheduled=None,
            first_token=None,
            finished=now,
        )
        for output in ([] if request.replay else _choices(request).values())
    ]


def _choices(request: Submit) -> dict[int, list[int]]:
    """The output so far of each running choice."""
    resumed = {choice.index: choice.output for choice in request.resumed}
    return resumed or {index: [] for index in range(request.n)}
