"""Outputs for the prompts themselves: log-probabilities and embeddings, collected by chunk."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np

from chairlift.engine.errors import RowFailed
from chairlift.engine.messages import PromptLogprobs, TokenOutput
from chairlift.engine.model.chunk import Chunk
from chairlift.engine.model.forward import ForwardOutput
from chairlift.engine.sampling.logprobs import TopLogprobs, top_logprobs_in_slices
from chairlift.scheduler.plan import Plan
from chairlift.scheduler.sequence import Sequence


class PromptOutput(Protocol):
    """The output for one prompt."""

    def add(self, tokens: list[int], scored: mx.array | None, hidden: mx.array | None) -> None:
        """Adds the graph for one chunk; nothing is computed yet.

        Args:
            tokens: the prompt's tokens after the chunk's first token.
            scored: logits ``[scored, vocabulary]`` of the chunk's first tokens, if requested.
            hidden: ``[tokens of the chunk, hidden size]``, if the prompt is pooled.
        """
        ...

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate with the step of the last added chunk."""
        ...

    def add_to(self, output: TokenOutput) -> None:
        """Sets the output's fields from the evaluated arrays.

        Raises:
            RowFailed: the model's numbers are not finite.
        """
        ...


class PromptOutputs:
    """The outputs of all prompts in prefill that request any.

    Like its cache, a prompt's output covers the tokens computed so far. A preempted prompt keeps
    both, or loses both and starts again.
    """

    def __init__(self) -> None:
        self._by_sequence: dict[Sequence, PromptOutput] = {}

    def take(self, plan: Plan, chunks: list[Chunk], outcome: ForwardOutput) -> list[mx.array]:
        """Adds the graphs for a plan's chunks; returns arrays to evaluate with the step."""
        self._by_sequence = {s: one for s, one in self._by_sequence.items() if not s.finished}
        arrays: list[mx.array] = []
        for number, sequence in enumerate(plan.chunks):
            start = plan.cached.get(sequence, sequence.computed)
            if not start or sequence not in self._by_sequence:
                output = _prompt_output_of(sequence)
                if output is None:
                    continue
                self._by_sequence[sequence] = output
            self._by_sequence[sequence].add(
                sequence.tokens[start + 1 :],
                outcome.scored.get(number),
                outcome.hidden.get(number),
            )
            arrays += self._by_sequence[sequence].arrays
        return arrays

    def ended(self, plan: Plan) -> dict[Sequence, PromptOutput]:
        """Removes and returns the outputs of the prompts that end with a plan, by choice."""
        ends = {**plan.joins, **plan.ends}
        ended = {s: self._by_sequence.pop(s) for s in set(ends.values()) if s in self._by_sequence}
        return {choice: ended[s] for choice, s in ends.items() if s in ended}


def _prompt_output_of(sequence: Sequence) -> PromptOutput | None:
    if sequence.prompt_logprobs is not None:
        return _Scores(sequence.prompt_logprobs)
    match sequence.pooling:
        case "mean":
            return _Mean()
        case "last":
            return _Last()
    return None


class _Scores:
    """Log-probabilities of a prompt's tokens, and of the k most likely ones at each position."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._parts: list[TopLogprobs] = []

    def add(self, tokens: list[int], scored: mx.array | None, hidden: mx.array | None) -> None:
        if scored is not None:
            following = mx.array(tokens[: scored.shape[0]], mx.int32)
            k = min(self._k, scored.shape[1])
            self._parts.append(top_logprobs_in_slices(scored, following, k))

    @property
    def arrays(self) -> list[mx.array]:
        return [*self._parts[-1]] if self._parts else []

    def add_to(self, output: TokenOutput) -> None:
        chosen = [np.array(part.chosen, np.float32) for part in self._parts]
        top = [np.array(part.top, np.float32) for part in self._parts]
        # -inf means that the model rules out a token. Other logits that are not finite give NaN.
        if any(np.isnan(part).any() for part in (*chosen, *top)):
            raise RowFailed("the model's logits for the prompt are not finite", "nonfinite_logits")
        output.prompt_logprobs = PromptLogprobs(
            b"".join(part.tobytes() for part in chosen),
            b"".join(np.array(part.top_ids, np.int32).tobytes() for part in self._parts),
            b"".join(part.tobytes() for part in top),
        )


class _Last:
    """The hidden state of a prompt's last token."""

    def __init__(self) -> None:
        self._state = mx.zeros((0,))

    def add(self, tokens: list[int], scored: mx.array | None, hidden: mx.array | None) -> None:
        assert hidden is not None
        self._state = hidden[-1].astype(mx.float32)

    @property
    def arrays(self) -> list[mx.array]:
        return [self._state]

    def add_to(self, output: TokenOutput) -> None:
        output.embedding = _vector(self._state)


class _Mean:
    """The mean of the hidden states of all tokens of a prompt, summed in float32."""

    def __init__(self) -> None:
        self._tokens = 0
        self._sum = self._mean = mx.array(0.0)

    def add(self, tokens: list[int], scored: mx.array | None, hidden: mx.array | None) -> None:
        assert hidden is not None
        self._tokens += hidden.shape[0]
        self._sum = self._sum + hidden.astype(mx.float32).sum(axis=0)
        self._mean = self._sum / self._tokens

    @property
    def arrays(self) -> list[mx.array]:
        return [self._sum, self._mean]

    def add_to(self, output: TokenOutput) -> None:
        output.embedding = _vector(self._mean)


def _vector(values: mx.array) -> bytes:
    vector = np.array(values, np.float32)
    if not np.isfinite(vector).all():
        raise RowFailed("the model's hidden states are not finite", "nonfinite_hidden")
    return vector.tobytes()
