"""Penalties on tokens that have occurred, from counts on the device, one line of counts per row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np

# No penalty makes a logit larger than this, or one above its negative less than that. It is well
# within float32.
HIGHEST = 1e38


class TokenCounts:
    """The tokens in each row's prompt, and their counts in its output.

    Attributes:
        in_prompt: ``[rows, vocabulary]`` booleans.
        in_output: ``[rows, vocabulary]`` int32.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.in_prompt = mx.zeros((0, vocabulary), mx.bool_)
        self.in_output = mx.zeros((0, vocabulary), mx.int32)

    def rearrange(self, kept: Seq[int], joined: Seq[tuple[Seq[int], Seq[int]] | None]) -> None:
        """Keeps the rows numbered ``kept``, in that order, then adds (prompt, output) rows; None
        for those without penalties.
        """
        # One array for all new rows: an array for each takes twice as long with small vocabularies.
        shape = (len(joined), self._vocabulary)
        prompts, outputs = np.zeros(shape, np.bool_), np.zeros(shape, np.int32)
        for line, own in enumerate(joined):
            prompt, output = own or ((), ())
            prompts[line] = (
                np.bincount(np.asarray(prompt, np.int64), minlength=self._vocabulary) > 0
            )
            counts = np.bincount(np.asarray(output, np.int64), minlength=self._vocabulary)
            outputs[line] = counts
        index = mx.array(list(kept), mx.int32)
        self.in_prompt, self.in_output = (
            mx.concatenate(([before[index]] if kept else []) + ([mx.array(new)] if joined else []))
            for before, new in ((self.in_prompt, prompts), (self.in_output, outputs))
        )

    def count(self, tokens: mx.array) -> None:
        """Counts one output token of every row.

        Args:
            tokens: ``[rows]``, each within the vocabulary; see ``Sampled``.
        """
        rows = mx.arange(tokens.shape[0])
        self.in_output = self.in_output.at[rows, tokens].add(1)

    def continued(self, rows: Seq[int], outputs: Seq[Seq[int]]) -> TokenCounts:
        """The counts of these rows, each with some more output tokens.

        Args:
            rows: numbers of rows, in any order and any number of times.
            outputs: for each of ``rows``, tokens within the vocabulary.
        """
        index = mx.array(list(rows), mx.int32)
        counts = TokenCounts(self._vocabulary)
        counts.in_prompt = self.in_prompt[index]
        counts.in_output = self.in_output[index]
        places = [row for row, output in enumerate(outputs) for _ in output]
        tokens = [token for output in outputs for token in output]
        if places:
            lines, columns = mx.array(places, mx.int32), mx.array(tokens, mx.int32)
            counts.in_output = counts.in_output.at[lines, columns].add(1)
        return counts

    def penalize(
        self, logits: mx.array, repetition: mx.array, presence: mx.array, frequency: mx.array
    ) -> mx.array:
        """Applies the three penalties, each ``[rows, 1]``; see ``SamplingParams``.

        Returns:
            ``[rows, vocabulary]``; finite logits stay finite.
        """
        call = _penalized if mx.default_device() == mx.cpu else _compiled()
        counted = self.in_prompt, self.in_output
        result: mx.array = call(logits, *counted, repetition, presence, frequency)
        return result


def _penalized(
    logits: mx.array,
    in_prompt: mx.array,
    in_output: mx.array,
    repetition: mx.array,
    presence: mx.array,
    frequency: mx.array,
) -> mx.array:
    present = in_output > 0
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    bounded = mx.clip(repeated, mx.minimum(logits, -HIGHEST), HIGHEST)
    # Other tokens keep their logits: a row's tokens do not depend on the penalties of others.
    logits = mx.where(in_prompt | present, bounded, logits)
    return logits - presence * present - frequency * in_output


@functools.cache
def _compiled() -> Callable[..., mx.array]:
    """``_penalized`` as one kernel: its twelve operations would each read and write all logits."""
    call: Callable[..., mx.array] = mx.compile(_penalized, shapeless=True)
    return call
