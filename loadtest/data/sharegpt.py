"""The data set sharegpt: how people begin conversations, and how long they were answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from chairlift.loadtest.data.workload import Request, TokenCounter
from chairlift.loadtest.errors import UsageError

# In tokens, vLLM's: what is shorter tells nothing, what is longer costs too much time.
MIN_LEN = 4
MAX_PROMPT_LEN = 1024
MAX_TOTAL_LEN = 2048

# Conversations whose tokens are counted at the same time.
_COUNTED_AT_ONCE = 16


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


async def sharegpt_requests(
    path: Path,
    count: int,
    output_len: int | None,
    rng: np.random.Generator,
    count_tokens: TokenCounter,
    built: Callable[[], None],
) -> list[Request]:
    """``count`` first turns of a ShareGPT file, drawn at random, with the lengths of their answers.

    Left out are conversations of one turn, and what vLLM leaves out: prompts, or answers where they
    tell the length, of less than 4 tokens, prompts of more than 1,024, and both together of more
    than 2,048. ``output_len`` (tokens) overrides the answers' own. Where too few are left, they are
    drawn again. Where the server cannot count tokens, a word stands for one. ``built`` is called
    after each that is taken.

    Raises:
        UsageError: the file cannot be read, is no such file, or nothing of it is left.
    """
    turns = _first_turns(path)
    order = iter(rng.permutation(len(turns)).tolist())
    taken: list[Request] = []
    while len(taken) < count and (some := list(itertools.islice(order, _COUNTED_AT_ONCE))):
        for request in await asyncio.gather(
            *(_measured(turns[i], output_len, count_tokens) for i in some)
        ):
            if _fits(request, output_len) and len(taken) < count:
                taken.append(request)
                built()
    if not taken:
        raise UsageError(
            f"--dataset-path: {path} holds no conversation with a prompt of {MIN_LEN} to"
            f" {MAX_PROMPT_LEN} tokens and, with its answer, at most {MAX_TOTAL_LEN}"
        )
    again = rng.integers(len(taken), size=count - len(taken))
    return [*taken, *(taken[i] for i in again)]


def _first_turns(path: Path) -> list[list[_Turn]]:
    try:
        read = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise UsageError(f"--dataset-path: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--dataset-path: {path} is not a ShareGPT file, a JSON list of"
            f' {{"conversations": [{{"value": text}}, …]}}: {error}'
        ) from error
    turns = [entry.conversations[:2] for entry in read if len(entry.conversations) > 1]
    if not turns:
        raise UsageError(f"--dataset-path: {path} holds no conversation of two turns")
    return turns


async def _measured(
    turns: list[_Turn], output_len: int | None, count_tokens: TokenCounter
) -> Request:
    prompt, answer = (turn.value for turn in turns)
    return Request(
        prompt,
        await _length(prompt, count_tokens),
        await _length(answer, count_tokens) if output_len is None else output_len,
    )


async def _length(text: str, count_tokens: TokenCounter) -> int:
    tokens = await count_tokens(text) if text else 0
    return len(text.split()) if tokens is None else tokens


def _fits(request: Request, output_len: int | None) -> bool:
    # An answer's length that was asked for may be as short as one likes.
    least = 1 if output_len is not None else MIN_LEN
    return (
        MIN_LEN <= request.prompt_len <= MAX_PROMPT_LEN
        and request.output_len >= least
        and request.prompt_len + request.output_len <= MAX_TOTAL_LEN
    )
