"""The parts of a ReplyFormatter that chat completions and completions share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from chairlift.api.errors import Problem
from chairlift.api.generate.generation import Generation
from chairlift.api.http.sse import PLAIN
from chairlift.api.schemas.replies import ChatChunk, Completion, Usage
from chairlift.api.schemas.schemas import GenerationRequest

ChoiceT = TypeVar("ChoiceT", bound=msgspec.Struct)


class ChunkFormatter(ABC, Generic[ChoiceT]):
    """Formats the end and the errors of a stream, and the usage that ``stream_options`` ask for.

    With ``include_usage`` a last chunk without choices has the total usage; with
    ``continuous_usage_stats`` every chunk has the usage so far.
    """

    framing = PLAIN

    def __init__(self, generation: Generation, request: GenerationRequest) -> None:
        options = request.stream_options
        self._generation = generation
        self._total_usage = options is not None and options.include_usage
        self._usage_so_far = options is not None and options.continuous_usage_stats

    @abstractmethod
    def _chunk(self, choices: list[ChoiceT]) -> ChatChunk | Completion:
        """A chunk of the stream with these choices and ``_chunk_usage``."""

    def closing(self, usage: Usage) -> Sequence[msgspec.Struct]:
        if not self._total_usage:
            return []
        chunk = self._chunk([])
        chunk.usage = usage
        return [chunk]

    def failure(self, problem: Problem) -> Sequence[msgspec.Struct]:
        return [problem.reply()]

    def _chunk_usage(self) -> Usage | UnsetType | None:
        """The field ``usage`` of a chunk: null before a total that comes last, else absent."""
        if self._usage_so_far:
            return self._generation.usage()
        return None if self._total_usage else UNSET
