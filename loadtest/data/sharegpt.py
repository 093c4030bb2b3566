"""The data set sharegpt: first questions of real conversations, with the lengths of the answers."""

from __future__ import annotations

import asyncio
import codecs
import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from chairlift.loadtest.data.workload import TokenCounter, WorkloadRequest
from chairlift.loadtest.errors import UsageError

# Limits in tokens, as in vLLM. Shorter ones measure nothing, longer ones take too much time.
MIN_LEN = 4
MAX_PROMPT_LEN = 1024
MAX_TOTAL_LEN = 2048

# Conversations whose tokens are counted concurrently.
_COUNT_CONCURRENCY = 16


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
) -> list[WorkloadRequest]:
    """Draws first questions from a ShareGPT file at random, with the lengths of their answers.

    It skips conversations of one turn and, as vLLM does, prompts of less than 4 or more than 1,024
    tokens, answers of less than 4 tokens unless ``output_len`` is given, and pairs of more than
    2,048 tokens. If too few remain, they are drawn again.

    Args:
        path: the file.
        count: the number of requests.
        output_len: output tokens of each request; None: the length of the answer.
        rng: the generator.
        count_tokens: counts tokens with the server's tokenizer; if it cannot, words are counted.
        built: called after each request.

    Raises:
        UsageError: the file cannot be read, is not a ShareGPT file, or no conversation remains.
    """
    turns = _first_turns(path)
    order = iter(rng.permutation(len(turns)).tolist())
    taken: list[WorkloadRequest] = []
    while len(taken) < count and (some := list(itertools.islice(order, _COUNT_CONCURRENCY))):
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
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        read = msgspec.json.decode(text, type=list[_Conversation])
    except OSError as error:
        raise UsageError(f"--dataset-path: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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
) -> WorkloadRequest:
    prompt, answer = (turn.value for turn in turns)
    return WorkloadRequest(
        prompt,
        await _length(prompt, count_tokens),
        await _length(answer, count_tokens) if output_len is None else output_len,
    )


async def _length(text: str, count_tokens: TokenCounter) -> int:
    tokens = await count_tokens(text) if text else 0
    return len(text.split()) if tokens is None else tokens


def _fits(request: WorkloadRequest, output_len: int | None) -> bool:
    # A length set by the flag may be shorter.
    min_output_len = 1 if output_len is not None else MIN_LEN
    return (
        MIN_LEN <= request.prompt_len <= MAX_PROMPT_LEN
        and request.output_len >= min_output_len
        and request.prompt_len + request.output_len <= MAX_TOTAL_LEN
    )
