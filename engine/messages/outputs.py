"""Output tokens and log-probabilities."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_TOP_LOGPROBS = 20


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one output position.

    Attributes:
        logprob: the chosen token's.
        top: (token id, log-probability) of the most likely tokens, best first.
    """

    logprob: float
    top: list[tuple[int, float]]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of a prompt's tokens, given those before; the first token has none.

    The fields are arrays of 32-bit numbers in the machine's byte order, because a prompt may have a
    million tokens.

    Attributes:
        chosen: the log-probability of each token of the prompt.
        top_ids: the ids of the most likely tokens, the same number at each position, best first.
        top: the log-probabilities of ``top_ids``.
    """

    chosen: bytes
    top_ids: bytes
    top: bytes

    def __iter__(self) -> Iterator[TokenLogprobs]:
        """Yields one position after the other."""
        chosen, ids, top = array("f", self.chosen), array("i", self.top_ids), array("f", self.top)
        k = len(ids) // len(chosen) if chosen else 0
        for i, logprob in enumerate(chosen):
            best = slice(i * k, (i + 1) * k)
            yield TokenLogprobs(logprob, list(zip(ids[best], top[best], strict=True)))


class PrefillTimes(msgspec.Struct, array_like=True):
    """The times of a request's prefill.

    Attributes:
        chunks: for each step that computed a part of the prompt, at least one: the time at which
            the step was built, and its tokens of this prompt.
        first_token: the time at which the first token was read.
    """

    chunks: list[tuple[float, int]]
    first_token: float

    @property
    def scheduled(self) -> float:
        """The time at which the request's first step was built."""
        return self.chunks[0][0]


class TokenOutput(msgspec.Struct, array_like=True):
    """New tokens of one choice of one request.

    Only the first output of each choice has ``cached_tokens``, ``prefill_times`` and
    ``prompt_logprobs``, which are the request's and the same for all its choices.

    Attributes:
        token_ids: the last of them may be the end-of-text or stop token that ended the choice: it
            counts in usage, but its text is not part of the reply.
        finish: set on the choice's last output, and only there.
        ended_by_token: the last of ``token_ids`` ended the choice.
        error: explains a ``finish`` of "error".
        cached_tokens: prompt tokens that were taken from the prefix cache.
        embedding: the result of pooling: float32 numbers in the machine's byte order.
        client_error: the error lies in what the request asks for, not in the engine.
        accepted: how many of ``token_ids``, from the first on, were proposed before they were
            computed.
        rejected: other proposed tokens, which the model did not choose.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    ended_by_token: bool = False
    error: str | None = None
    cached_tokens: int = 0
    prefill_times: PrefillTimes | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes | None = None
    client_error: bool = False
    accepted: int = 0
    rejected: int = 0
