"""What is sent: prompts and how many tokens each reply shall have."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.loadtest.errors import UsageError
from chairlift.loadtest.words import WORDS

# As vLLM's custom data set: the length of a reply where neither flag nor file gives one.
DEFAULT_CUSTOM_OUTPUT_LEN = 256

# Text is sized by adding or dropping as many words as tokens are wrong. Most words are one token,
# so two rounds do it; where a tokenizer never gets there, a few tokens off are no matter.
_SIZING_ROUNDS = 4
_SIZING_CONCURRENCY = 16

# Tokens the server makes of a text, its special tokens included; None where it cannot tell.
TokenCounter = Callable[[str], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request to be sent. ``prompt_len`` is tokens, as well as it is known before sending.

    ``body`` holds fields of its own, which go before those its client adds to every request.
    """

    prompt: str
    prompt_len: int
    output_len: int
    body: Mapping[str, Any] = field(default_factory=dict)


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
) -> list[Request]:
    """Prompts of random words, the same for the same lengths, generator and tokenizer.

    They are text, not token ids, so that any server takes them. Where the server cannot count
    tokens, a word stands for one.
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
                if tokens < input_len:
                    words += _draw_words(input_len - tokens, stream)
                else:
                    del words[max(1, len(words) - (tokens - input_len)) :]
            return Request(prompt, input_len if tokens is None else tokens, output_len)

    return await asyncio.gather(*map(build, input_lens, output_lens, streams))


def _draw_words(count: int, rng: np.random.Generator) -> list[str]:
    return [WORDS[i] for i in rng.integers(len(WORDS), size=count)]


def custom_requests(path: Path, count: int, output_len: int | None) -> list[Request]:
    """The first ``count`` prompts of a JSONL file of ``{"prompt": …, "output_tokens": …}``.

    A file with fewer lines is gone through again. ``output_len`` overrides the file's own.

    Raises:
        UsageError: the file cannot be read, is empty, or a line is not as above.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--dataset-path: {error}") from error
    requests = [
        _parse_line(line, f"{path}:{number}", output_len)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not requests:
        raise UsageError(f"--dataset-path: {path} holds no prompts")
    return list(itertools.islice(itertools.cycle(requests), count))


def _parse_line(line: str, where: str, output_len: int | None) -> Request:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f'{where}: no "prompt" text')
    wanted = output_len or entry.get("output_tokens", DEFAULT_CUSTOM_OUTPUT_LEN)
    if not isinstance(wanted, int) or wanted < 1:
        raise UsageError(f'{where}: "output_tokens" must be a whole number of at least 1')
    # Its own words count as tokens until the server's usage tells better.
    return Request(prompt, len(prompt.split()), wanted)
