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
        uncut: the tokens that see each other, also those behind them, so that one model call has
            to compute them: successive ones, in order.

    Attributes:
        shift: the position of each token behind the prompt, minus its place.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        images: Sequence[PromptImage],
        shifts: Positions | None,
        embeddings: Callable[[PromptImage, Sequence[int]], mx.array],
        uncut: tuple[range, ...] = (),
    ) -> None:
        self._prompt = prompt
        self._images = images
        self._shifts = shifts
        self._embeddings = embeddings
        self.uncut = uncut
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
                own = self._embeddings(image, self._prompt[image.span])
                whole = len(inside) == len(image.places)
                parts.append(own if whole else own[inside[0] : inside[-1] + 1])
        together = [
            range(max(run.start, start) - start, min(run.stop, stop) - start)
            for run in self.uncut
            if run.start < stop and start < run.stop
        ]
        embeddings = mx.concatenate(parts) if parts else None
        return TokenInputs(padded, self._shift_of(start, count), places, embeddings, together)

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


def _shift_behind(shifts: Positions) -> int:
    """The shift of tokens after the prompt: their positions follow the prompt's largest one."""
    length: int = shifts.shape[1]
    return int((shifts + np.arange(length)).max()) + 1 - length
