"""A running choice as the API process knows it: enough to resume it in a new engine."""

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
        """Takes the next tokens."""
        if self.first_token is None:
            self.first_token = now
            self.cached_tokens = output.cached_tokens
        self.last_token = now
        self.output += output.token_ids

    def resumed(self, index: int, scheduled: float | None) -> Resumed:
        """What another engine needs to resume it. Without a known ``scheduled`` time, that of the
        first token is used.
        """
        if self.first_token is None:
            return Resumed(index, [])
        begun = self.first_token if scheduled is None else min(scheduled, self.first_token)
        return Resumed(
            index, self.output, self.cached_tokens, begun, self.first_token, self.last_token
        )

    def finished(
        self, request: Submit, reason: FinishReason, scheduled: float | None, now: float
    ) -> FinishedChoice:
        """The choice's record for the metrics if no engine reports it."""
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
        )
