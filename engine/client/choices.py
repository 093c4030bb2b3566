"""The API process's record of a running choice, from which another engine can resume it."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.engine.messages import FinishedChoice, FinishReason, Resumed, Submit, TokenOutput


@dataclass(slots=True)
class RunningChoice:
    """The received part of a choice. Times are seconds of ``time.monotonic()``."""

    output: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None

    def add(self, output: TokenOutput, now: float) -> None:
        """Adds the choice's next tokens, which arrived at the time ``now``."""
        if self.first_token is None:
            self.first_token = now
            self.cached_tokens = output.cached_tokens
        self.last_token = now
        self.output += output.token_ids

    def resumed(self, index: int, scheduled: float | None) -> Resumed:
        """The record from which another engine resumes the choice.

        Args:
            scheduled: when the request was first scheduled; if None, the time of the first token
                takes its place.
        """
        if self.first_token is None:
            return Resumed(index, [])
        started = self.first_token if scheduled is None else min(scheduled, self.first_token)
        return Resumed(
            index, self.output, self.cached_tokens, started, self.first_token, self.last_token
        )

    def finished(
        self, request: Submit, reason: FinishReason, scheduled: float | None, now: float
    ) -> FinishedChoice:
        """The choice's record for the metrics, for a choice that no engine reports."""
        known = self.resumed(0, scheduled)
        return FinishedChoice(
            reason=reason,
            prompt_tokens=len(request.prompt),
            generated_tokens=len(self.output),
            max_tokens=request.params.max_tokens,
            n=request.n,
            arrival=request.arrival,
            scheduled=known.scheduled,
            first_token=known.first_token,
            finished=now,
            cached_tokens=self.cached_tokens,
            last_token=self.last_token,
        )
