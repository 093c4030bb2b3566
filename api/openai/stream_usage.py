"""The usage in a stream's chunks, as ``stream_options`` asks for it."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from chairlift.api.generate.generation import Generation
from chairlift.api.schemas.replies import Usage
from chairlift.api.schemas.schemas import GenerationRequest


class StreamUsage:
    """What the chunks of ``generation`` say of tokens.

    ``at_end``: one more chunk than there are of choices says the total.
    """

    def __init__(self, request: GenerationRequest, generation: Generation) -> None:
        options = request.stream_options
        self.at_end = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        self._generation = generation

    def so_far(self) -> Usage | UnsetType | None:
        """The usage of a chunk: null, or absent, where only the total or nothing is asked for."""
        if self._continuous:
            return self._generation.usage()
        return None if self.at_end else UNSET
