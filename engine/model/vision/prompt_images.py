"""The images of one request: which embeddings and positions the tokens of its prompt have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from chairlift.engine.messages import PromptImage
from chairlift.engine.model.vision.token_inputs import Positions, TokenInputs


class PromptImages:
    """The images of one request's prompt.

    Args:
        prompt: the prompt's tokens.
        images: the images, in the order of their places.
        shifts: the positions of the prompt's tokens minus their places, ``[axes, tokens]``; None
            if they are the same.
        embeddings: returns the embeddings of an image with these tokens.
        both_ways: an image's tokens also see those behind them.

    Attributes:
        shift: the position of each token behind the prompt, minus its place.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        images: Sequence[PromptImage],
        shifts: Positions | None,
        embeddings: Callable[[PromptImage, Sequence[int]], mx.array],
        both_ways: bool = False,
    ) -> None:
        self._prompt = prompt
        self._images = images
        self._shifts = shifts
        self._embeddings = embeddings
        # Tokens that have to be in one model call.
        self.uncut = _runs(images) if both_ways else ()
        self.shift = 0 if shifts is None else _shift_behind(shifts)

    def inputs(self, start: int, count: int, padded: int) -> TokenInputs:
        """The inputs of the tokens ``[start, start + count)``, padded to ``padded`` tokens."""
        stop = start + count
        places: list[int] = []
        parts: list[mx.array] = []
        for image in self._images:
            if image.places[-1] < start or image.places[0] >= stop:
                continue
            inside = [n for n, place in enumerate(image.places) if start <= place < stop]
            if inside:
                places += [image.places[n] - start for n in inside]
                embeddings = self._embeddings(image, self._prompt[image.span])
                whole = len(inside) == len(image.places)
                parts.append(embeddings if whole else embeddings[inside[0] : inside[-1] + 1])
        return TokenInputs(
            padded, self._shift_of(start, count), places, mx.concatenate(parts) if parts else None
        )

    def has_places(self, start: int, count: int) -> bool:
        """Whether one of the tokens ``[start, start + count)`` is an image's."""
        stop = start + count
        return any(start <= place < stop for image in self._images for place in image.places)

    def sees_ahead(self, start: int, count: int) -> bool:
        """Whether one of the tokens ``[start, start + count)`` sees those behind it."""
        return any(run.start < start + count and start < run.stop for run in self.uncut)

    def _shift_of(self, start: int, count: int) -> int | Positions:
        if self._shifts is None or start >= self._shifts.shape[1]:
            return self.shift
        known = self._shifts[:, start : start + count]
        if known.shape[1] == count:
            return known
        # The output of a sequence that is computed again follows its prompt.
        shifts = self._shifts[:, [-1] * count].copy()
        shifts[:, : known.shape[1]] = known
        shifts[:, known.shape[1] :] = self.shift
        return shifts


def _runs(images: Sequence[PromptImage]) -> tuple[range, ...]:
    """The successive tokens of images."""
    runs: list[range] = []
    for place in (place for image in images for place in image.places):
        if runs and runs[-1].stop == place:
            runs[-1] = range(runs[-1].start, place + 1)
        else:
            runs.append(range(place, place + 1))
    return tuple(runs)


def _shift_behind(shifts: Positions) -> int:
    """Positions go on after the largest one of the prompt."""
    length: int = shifts.shape[1]
    return int((shifts + np.arange(length)).max()) + 1 - length
