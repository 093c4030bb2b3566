"""Requests, and the data set random: prompts of random words with given numbers of tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from chairlift.loadtest.data.words import WORDS

# A prompt gets its length in rounds: each adds or removes the average number of words for the
# missing or extra tokens. Two rounds are mostly enough; with some tokenizers a prompt stays a few
# tokens off, which does not matter.
_SIZING_ROUNDS = 4
_SIZING_CONCURRENCY = 16

# The longest prompt or reply: servers store lengths in 32 bits.
MAX_TOKENS = 2**31 - 1

# Counts the tokens of a text, including special tokens, with the server's tokenizer; returns None
# if the server cannot.
TokenCounter = Callable[[str], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload.

    Attributes:
        prompt: the prompt's text.
        prompt_len: its tokens, as far as they are known before sending.
        output_len: maximum output tokens.
        body: further fields; they override those that the client adds to every request.
        cancel_after: the client disconnects after this many tokens; None: it does not.
        bytes_per_s: the client reads at most this many bytes per second; None: no limit.
    """

    prompt: str
    prompt_len: int
    output_len: int
    body: Mapping[str, Any] = field(default_factory=dict)
    cancel_after: int | None = None
    bytes_per_s: float | None = None

    @property
    def behaved(self) -> WorkloadRequest:
        """The same request without cancellation and slow reading."""
        return replace(self, cancel_after=None, bytes_per_s=None)


def draw_lengths(mean: int, ratio: float, count: int, rng: np.random.Generator) -> list[int]:
    """Lengths drawn uniformly from [mean·(1-ratio), mean·(1+ratio)], at least 1."""
    low = max(1, math.floor(mean * (1 - ratio)))
    high = math.ceil(mean * (1 + ratio))
    return [int(n) for n in rng.integers(low, high + 1, size=count)]


async def random_requests(
    input_lens: list[int],
    output_lens: list[int],
    rng: np.random.Generator,
    count_tokens: TokenCounter,
    built: Callable[[], None] = lambda: None,
) -> list[WorkloadRequest]:
    """Prompts of random words, determined by the lengths, the generator and the tokenizer.

    They are text instead of token ids, so that any server accepts them. If the server cannot count
    tokens, words are counted instead. ``built`` is called after each request.
    """
    # Each prompt has its own generator, so that its words do not depend on the order of sizing.
    streams = rng.spawn(len(input_lens))
    limit = asyncio.Semaphore(_SIZING_CONCURRENCY)

    async def build(
        input_len: int, output_len: int, stream: np.random.Generator
    ) -> WorkloadRequest:
        async with limit:
            words = _draw_words(input_len, stream)
            for _ in range(_SIZING_ROUNDS):
                prompt = " ".join(words)
                tokens = await count_tokens(prompt)
                if tokens is None or tokens == input_len:
                    break
                difference = max(1, round(abs(tokens - input_len) * len(words) / tokens))
                if tokens < input_len:
                    words += _draw_words(difference, stream)
                else:
                    del words[max(1, len(words) - difference) :]
            built()
            return WorkloadRequest(prompt, input_len if tokens is None else tokens, output_len)

    return await asyncio.gather(*map(build, input_lens, output_lens, streams))


def _draw_words(count: int, rng: np.random.Generator) -> list[str]:
    return [WORDS[i] for i in rng.integers(len(WORDS), size=count)]
