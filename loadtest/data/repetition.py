"""The data set prefix_repetition: many prompts with few prefixes, as in ``vllm bench serve``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from chairlift.loadtest.data.workload import TokenCounter, WorkloadRequest, random_requests


async def prefix_repetition_requests(
    count: int,
    prefix_len: int,
    suffix_len: int,
    prefixes: int,
    output_len: int,
    rng: np.random.Generator,
    count_tokens: TokenCounter,
    built: Callable[[], None],
) -> list[WorkloadRequest]:
    """Builds prompts in random order, each with one of few prefixes and a suffix of its own.

    The prefixes are used equally often, up to a difference of one. Lengths are in tokens.

    Args:
        count: the number of prompts.
        prefix_len: length of a prefix.
        suffix_len: length of a suffix.
        prefixes: the number of prefixes.
        output_len: maximum output tokens.
        rng: the generator.
        count_tokens: counts tokens with the server's tokenizer.
        built: called after each request.
    """
    heads = await random_requests(
        [prefix_len] * prefixes, [output_len] * prefixes, rng, count_tokens
    )
    tails = await random_requests(
        [suffix_len] * count, [output_len] * count, rng, count_tokens, built
    )
    joined = [
        replace(
            tail,
            prompt=f"{heads[i % prefixes].prompt} {tail.prompt}",
            prompt_len=heads[i % prefixes].prompt_len + tail.prompt_len,
        )
        for i, tail in enumerate(tails)
    ]
    return [joined[i] for i in rng.permutation(count)]
