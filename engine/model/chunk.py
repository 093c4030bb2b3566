"""The next tokens of prompts, and how a model call arranges them behind those of rows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from chairlift.cache.kinds import Cache
from chairlift.engine.model.lora_routing import Slot
from chairlift.engine.model.vision.prompt_images import PromptImages
from chairlift.engine.model.vision.token_inputs import TokenInputs


class Chunk(NamedTuple):
    """The next tokens of one prompt.

    Attributes:
        cache: the prompt's cache, of one row.
        choices: the number of sequences that continue this prompt; 0 if the prompt does not end
            with this chunk.
        scored: the logits of this many first tokens are needed as well, for prompt logprobs.
        pooled: the hidden states of all tokens are needed.
        adapter: the slot of its adapter.
        images: the images of its prompt, see ``ImageEncoder.images_of``.
    """

    cache: Cache
    tokens: Seq[int]
    choices: int
    scored: int = 0
    pooled: bool = False
    adapter: Slot = None
    images: PromptImages | None = None

    @property
    def sees_ahead(self) -> bool:
        """Whether one of the tokens sees those behind it, so that one call has to compute them."""
        return bool(self.images and self.images.sees_ahead(self.cache.offsets[0], len(self.tokens)))

    def inputs(self, count: int, padded: int) -> TokenInputs:
        """The inputs of the cache's next ``count`` tokens, padded to ``padded`` tokens."""
        if self.images is None:
            return TokenInputs(padded)
        return self.images.inputs(self.cache.offsets[0], count, padded)

    def part(self, start: int, stop: int) -> Chunk:
        """The tokens ``[start, stop)``; only the last part ends the prompt."""
        tokens = self.tokens[start:stop]
        return self._replace(
            tokens=tokens,
            choices=self.choices if stop >= len(self.tokens) else 0,
            scored=max(0, min(len(tokens), self.scored - start)),
        )


class PackedTokens(NamedTuple):
    """The tokens of a model call that computes rows and chunks together.

    Attributes:
        new: the chunks' tokens, which follow the rows'.
        places: each chunk's tokens among all.
        positions: the tokens whose logits are needed.
        sampled: how many of ``positions``, the first ones, are sampled: those of rows, then those
            of choices.
        scored: which of ``positions`` score prompt tokens, by chunk number.
    """

    new: list[int]
    places: list[slice]
    positions: list[int]
    sampled: int
    scored: dict[int, slice]


def packed_tokens(rows: int, chunks: Seq[Chunk], lengths: Seq[int], tail: int = 0) -> PackedTokens:
    """Arranges the rows' tokens, ``rows``, and chunks, each padded to one of ``lengths``.

    ``tail`` is the number of unused tokens behind those of the chunks.
    """
    new: list[int] = []
    places: list[slice] = []
    positions = list(range(rows))
    for chunk, length in zip(chunks, lengths, strict=True):
        start = rows + len(new)
        places.append(slice(start, start + len(chunk.tokens)))
        positions += [places[-1].stop - 1] * chunk.choices
        new += [*chunk.tokens, *[0] * (length - len(chunk.tokens))]
    sampled = len(positions)
    scored = {}
    for number, (chunk, place) in enumerate(zip(chunks, places, strict=True)):
        if chunk.scored:
            scored[number] = slice(len(positions), len(positions) + chunk.scored)
            positions += range(place.start, place.start + chunk.scored)
    return PackedTokens(new + [0] * tail, places, positions, sampled, scored)
