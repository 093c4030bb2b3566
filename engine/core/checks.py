"""Validates the numbers of a request before the engine uses any of them.

The API has stricter checks, with its own error texts. These are the last checks: after them, every
number of a request that indexes memory is in range.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from chairlift.engine.errors import RequestError
from chairlift.engine.messages import MAX_TOP_LOGPROBS, SamplingParams, Submit
from chairlift.engine.model.vision.prompt_images import PromptImages
from chairlift.scheduler.limits import Limits

# The largest number that is added to logits or multiplied with them: far below float32's limit.
MAX_REAL = 1e6
# More than any number of tokens.
MAX_INT = 2**31
# The types of arrays that processors make of images.
IMAGE_DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8", "bool")


def check_submit(request: Submit, vocabulary: int) -> None:
    """Checks all numbers of a request that a step computes or indexes with.

    Args:
        vocabulary: the last dimension of the logits.

    Raises:
        ValueError: a number has the wrong type or is out of range; the text names its field.
    """
    if not request.prompt:
        raise ValueError("the prompt is empty")
    _check_tokens("the prompt", request.prompt, vocabulary)
    _check_tokens("the prediction", request.prediction, vocabulary)
    _check_integer("n", request.n, 1, MAX_INT)
    for choice in request.resumed:
        _check_integer("resumed", choice.index, 0, request.n)
        _check_tokens("resumed", choice.output, vocabulary)
    _check_images(request)
    if request.prompt_logprobs is not None:
        _check_integer("prompt_logprobs", request.prompt_logprobs, 0, MAX_TOP_LOGPROBS + 1)
    check_params(request.params, vocabulary)


def check_uncut(request: Submit, images: PromptImages | None, limits: Limits) -> tuple[range, ...]:
    """The prompt tokens of a request that have to be in one chunk.

    Args:
        images: those of the request; None: it has none.

    Raises:
        RequestError: there are more of them than a step computes beside all rows; or they are the
            whole prompt, whose tokens then have no log-probabilities.
    """
    if images is None or not images.uncut:
        return ()
    most = limits.max_step_tokens - limits.max_rows
    is_prompt = images.uncut == (range(len(request.prompt)),)
    if request.prompt_logprobs is not None:
        if is_prompt:
            raise RequestError(
                "prompt_logprobs: this model attends to the whole prompt in both directions"
            )
        most = min(most, limits.max_scored)
    if (longest := max(map(len, images.uncut))) > most:
        whole = "the prompt" if is_prompt else "an image"
        raise RequestError(
            f"{whole} has {longest} tokens, which have to be in one step, and a step computes "
            f"{most} (--max-step-tokens)"
        )
    return images.uncut


def _check_images(request: Submit) -> None:
    """Checks where the images are, and that their arrays have the bytes that they claim."""
    end = 0
    for image in request.images:
        if len(image.digest) != hashlib.sha256().digest_size:
            raise ValueError("an image's digest is not SHA-256")
        places = image.places
        ascending = all(a < b for a, b in pairwise(places))
        if not places or not ascending or not end <= places[0] <= places[-1] < len(request.prompt):
            raise ValueError("an image's places are not ascending, or not in the prompt")
        end = places[-1] + 1
        for array in image.arrays.values():
            if array.dtype not in IMAGE_DTYPES or min(array.shape, default=0) < 0:
                raise ValueError(f"an image's array has the type {array.dtype!r}, or no size")
            if math.prod(array.shape) * np.dtype(array.held_as).itemsize != len(array.data):
                raise ValueError("an image's array has another number of bytes than its shape")


def check_params(params: SamplingParams, vocabulary: int) -> None:
    """Checks the sampling parameters; see ``check_submit``."""
    _check_integer("max_tokens", params.max_tokens, 0, MAX_INT)
    _check_integer("min_tokens", params.min_tokens, 0, MAX_INT)
    _check_integer("seed", params.seed, -(2**63), 2**64)
    _check_real("temperature", params.temperature, lambda x: 0 <= x <= MAX_REAL)
    _check_integer("top_k", params.top_k, 0, MAX_INT)
    _check_real("top_p", params.top_p, lambda x: 0 <= x <= 1)
    _check_real("min_p", params.min_p, lambda x: 0 <= x <= 1)
    _check_real(
        "repetition_penalty", params.repetition_penalty, lambda x: 1 / MAX_REAL <= x <= MAX_REAL
    )
    _check_real("presence_penalty", params.presence_penalty, lambda x: abs(x) <= MAX_REAL)
    _check_real("frequency_penalty", params.frequency_penalty, lambda x: abs(x) <= MAX_REAL)
    for token, bias in params.logit_bias.items():
        _check_integer("logit_bias", token, 0, vocabulary)
        _check_real("logit_bias", bias, lambda x: abs(x) <= MAX_REAL)
    if params.logprobs is not None:
        _check_integer("logprobs", params.logprobs, 0, MAX_TOP_LOGPROBS + 1)
    for token in params.stop_token_ids:  # may be outside the vocabulary of the model's logits
        _check_integer("stop_token_ids", token, 0, MAX_INT)
    if (thinking := params.thinking) is not None:
        if not thinking.end:
            raise ValueError("thinking has no end")
        _check_tokens("thinking", thinking.end, vocabulary)
        _check_tokens("thinking", () if thinking.start is None else (thinking.start,), vocabulary)
        _check_integer("thinking", thinking.budget or 0, 0, MAX_INT)


def _check_tokens(name: str, tokens: tuple[int, ...] | list[int], vocabulary: int) -> None:
    # Without a loop in Python, because a prompt may have a million tokens.
    if set(map(type, tokens)) - {int} or (
        tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary
    ):
        raise ValueError(f"{name} has a token outside of 0 to {vocabulary - 1}")


def _check_integer(name: str, value: object, minimum: int, end: int) -> None:
    if type(value) is not int or not minimum <= value < end:
        raise ValueError(f"{name} has to be a whole number from {minimum} to {end - 1}")


def _check_real(name: str, value: float, fits: Callable[[float], bool]) -> None:
    if type(value) not in (int, float) or not fits(value):
        raise ValueError(f"{name} is not a number in its range")
