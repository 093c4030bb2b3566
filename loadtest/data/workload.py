"""What is sent: prompts and how many tokens each reply shall have."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from chairlift.loadtest.data.words import WORDS

# Text is sized by adding or dropping the words that as many tokens as are wrong take on average.
# Two rounds mostly do it; where a tokenizer never gets there, a few tokens off are no matter.
_SIZING_ROUNDS = 4
_SIZING_CONCURRENCY = 16

# Tokens the server makes of a text, its special tokens included; None where it cannot tell.
TokenCounter = Callable[[str], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request to be sent. ``prompt_len`` is tokens, as well as it is known before sending.

    ``body`` holds fields of its own, which go before those its client adds to every request. The
    client leaves after ``cancel_after`` tokens, and reads ``bytes_per_s`` bytes a second at most;
    None: it stays, and reads what comes.
    """

    prompt: str
    prompt_len: int
    output_len: int
    body: Mapping[str, Any] = field(default_factory=dict)
    cancel_after: int | None = None
    bytes_per_s: float | None = None

    @property
    def behaved(self) -> Request:
        """The same, sent by a client that reads what comes to its end."""
        return replace(self, cancel_after=None, bytes_per_s=None)


def draw_lengths(mean: int, ratio: float, count: int, rng: np.random.Generator) -> list[int]:
    """Lengths uniform over the integers of [mean·(1-ratio), mean·(1+ratio)], never below 1."""
    low = max(1, math.floor(mean * (1 - ratio)))
    high = math.ceil(mean * (1 + ratio))
    return [int(n) for n in rng.integers(low, high + 1, size=count)]


async def random_requests(
    input_lens: list[int],
    output_lens: list[int],
    rng: np.random.Generator,
    count_tokens: TokenCounter,
    built: Callable[[], None] = lambda: None,
) -> list[Request]:
    """Prompts of random words, the same for the same lengths, generator and tokenizer.

    They are text, not token ids, so that any server takes them. Where the server cannot count
    tokens, a word stands for one. ``built`` is called after each.
    """
    # Each prompt has its own generator, so that its words do not depend on which is sized first.
    streams = rng.spawn(len(input_lens))
    limit = asyncio.Semaphore(_SIZING_CONCURRENCY)

    async def build(input_len: int, output_len: int, stream: np.random.Generator) -> Request:
        async with limit:
            words = _draw_words(input_len, stream)
            for _ in range(_SIZING_ROUNDS):
                prompt = " ".join(words)
                tokens = await count_tokens(prompt)
                if tokens is None or tokens == input_len:
                    break
                wrong = max(1, round(abs(tokens - input_len) * len(words) / tokens))
                if tokens < input_len:
                    words += _draw_words(wrong, stream)
                else:
                    del words[max(1, len(words) - wrong) :]
            built()
            return Request(prompt, input_len if tokens is None else tokens, output_len)

    return await asyncio.gather(*map(build, input_lens, output_lens, streams))


def _draw_words(count: int, rng: np.random.Generator) -> list[str]:
    return [WORDS[i] for i in rng.integers(len(WORDS), size=count)]
