"""Echoes a completion's prompt: its text, and its tokens' log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chairlift.api.schemas.fields import Prompt
from chairlift.api.schemas.replies import CompletionLogprobs
from chairlift.api.text.logprobs import Scored, completion_logprobs, joined
from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.api.text.stream import TextStream
from chairlift.engine.messages import PromptLogprobs

if TYPE_CHECKING:  # it imports transformers, which takes a second
    from chairlift.api.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt to echo; ``text`` was given by the client or decoded from ``tokens``."""

    text: str
    tokens: Sequence[int]

    @classmethod
    async def from_prompt(
        cls, prompt: Prompt, tokens: Sequence[int], vocabulary: Vocabulary
    ) -> Echo:
        """The echo of ``prompt``, which was tokenized as ``tokens``."""
        return cls(prompt if isinstance(prompt, str) else await vocabulary.decode(tokens), tokens)

    def logprobs(
        self, logprobs: PromptLogprobs, vocabulary: Vocabulary, top: int
    ) -> CompletionLogprobs:
        """The log-probabilities in the form of /v1/completions; the first token has none."""
        starts = self._starts(vocabulary)
        following = zip(self.tokens[1:], logprobs, starts[1:], strict=True)
        rest = completion_logprobs([Scored(*entry) for entry in following], vocabulary, top)
        first = CompletionLogprobs(
            [vocabulary.token_text(self.tokens[0]).text], [None], [None] if top else None, [0]
        )
        return joined(first, rest)

    def _starts(self, vocabulary: Vocabulary) -> list[int]:
        """The offset of each token's text in ``text``, in characters."""
        stream = TextStream(vocabulary.detokenizer(), frozenset(), StopMatcher(Stops([])))
        starts = []
        for token in self.tokens:
            stream.add(token)
            starts.append(stream.start)
        stream.finish()
        # Tokens that the tokenizer adds before a text are not part of the text.
        before = max(0, stream.read - len(self.text))
        return [max(0, start - before) for start in starts]
