"""The ReplyFormatter of /infill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from chairlift.api.errors import Problem
from chairlift.api.generate.answer import AnsweredChoice
from chairlift.api.generate.generation import Generation
from chairlift.api.http.sse import Framing
from chairlift.api.llamacpp.replies import LlamaInfill, LlamaInfillPiece, LlamaTimings
from chairlift.api.schemas.replies import Usage
from chairlift.api.text.choice import OutputDelta


class InfillFormatter:
    """Formats the reply of a generation with one choice."""

    framing = Framing(named=False)

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def opening(self, index: int) -> Sequence[msgspec.Struct]:
        return []

    def chunks(self, delta: OutputDelta) -> Sequence[msgspec.Struct]:
        return [LlamaInfillPiece(delta.text)] if delta.text else []

    def closing(self, usage: Usage) -> Sequence[msgspec.Struct]:
        return [self._reply("", usage)]

    def failure(self, problem: Problem) -> Sequence[msgspec.Struct]:
        return [problem.reply()]

    def full_reply(self, choices: Sequence[AnsweredChoice], usage: Usage) -> msgspec.Struct:
        [choice] = choices
        return self._reply(choice.text, usage)

    def _reply(self, text: str, usage: Usage) -> LlamaInfill:
        [choice] = self._generation.choices
        stop_type: Literal["eos", "word", "limit"] = "eos"
        if choice.finish == "length":
            stop_type = "limit"
        elif choice.stop_string is not None:
            stop_type = "word"
        return LlamaInfill(
            text,
            self._generation.model.name,
            usage.completion_tokens,
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            stop_type,
            choice.stop_string or "",
            self._timings(usage),
        )

    def _timings(self, usage: Usage) -> LlamaTimings:
        times = self._generation.times[0]
        prefill, decode = times.prefill or 0.0, times.decode or 0.0
        cached = usage.prompt_tokens_details.cached_tokens
        computed = usage.prompt_tokens - cached
        return LlamaTimings(
            cached,
            computed,
            prefill * 1000,
            computed / prefill if prefill else 0.0,
            usage.completion_tokens,
            decode * 1000,
            usage.completion_tokens / decode if decode else 0.0,
        )
