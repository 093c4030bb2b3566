"""The data set random-mm: random prompts with images of random pixels, as in vLLM's benchmark."""

from __future__ import annotations

import ast
import asyncio
import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import UsageError

# vLLM's values.
LIMITS = '{"image": 255, "video": 1}'
BUCKETS = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5, (720, 1280, 16): 0.0}"
_LIMIT_FLAG, _BUCKET_FLAG = "--random-mm-limit-mm-per-prompt", "--random-mm-bucket-config"


class Size(NamedTuple):
    """The size of an image in pixels."""

    height: int
    width: int


@dataclass(frozen=True, slots=True)
class RandomImages:
    """How many images requests have, and of which sizes.

    Attributes:
        fewest, most: the number of a request's images is drawn uniformly between them.
        sizes: the possible sizes.
        weights: the probability of each.
    """

    fewest: int
    most: int
    sizes: Sequence[Size]
    weights: Sequence[float]

    @classmethod
    def of(cls, base: int, ratio: float, limits: str, buckets: str) -> Self:
        """From the values of vLLM's flags.

        Args:
            base: the number of a request's images.
            ratio: it varies from ``base * (1 - ratio)`` to ``base * (1 + ratio)``.
            limits: the most images of a request, as a dictionary by kind.
            buckets: the probability of each (height, width, frames).

        Raises:
            UsageError: a value is invalid, or asks for videos.
        """
        if base < 0:
            raise UsageError("--random-mm-base-items-per-request must not be negative")
        if not 0 <= ratio <= 1:
            raise UsageError("--random-mm-num-mm-items-range-ratio must be between 0 and 1")
        limit = _limit(limits)
        fewest, most = math.floor(base * (1 - ratio)), min(limit, math.ceil(base * (1 + ratio)))
        if fewest > most:
            raise UsageError(f"{_LIMIT_FLAG}: at most {limit} images, but at least {fewest}")
        wanted = _buckets(buckets)
        total = sum(wanted.values())
        return cls(fewest, most, tuple(wanted), [each / total for each in wanted.values()])

    async def added_to(
        self,
        requests: Sequence[WorkloadRequest],
        rng: np.random.Generator,
        built: Callable[[], None] = lambda: None,
    ) -> list[WorkloadRequest]:
        """The requests as conversations with images behind their texts.

        ``built`` is called after each request.

        Raises:
            UsageError: Pillow is not installed.
        """
        made = []
        for request in requests:
            # One by one on a thread: the event loop shows progress and sees Ctrl-C meanwhile.
            made.append(await asyncio.to_thread(self._with_images, request, rng))
            built()
        return made

    def _with_images(self, request: WorkloadRequest, rng: np.random.Generator) -> WorkloadRequest:
        count = rng.integers(self.fewest, self.most + 1)
        chosen = rng.choice(len(self.sizes), size=count, p=self.weights)
        content: list[dict[str, Any]] = [{"type": "text", "text": request.prompt}]
        for size in chosen:
            url = image_url(self.sizes[size], rng)
            content.append({"type": "image_url", "image_url": {"url": url}})
        messages = [{"role": "user", "content": content}]
        return replace(request, body={**request.body, "messages": messages})


def image_url(size: Size, rng: np.random.Generator) -> str:
    """A JPEG of random pixels as a data URL. Noise compresses worse than any photograph.

    Raises:
        UsageError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(
            "--dataset-name random-mm needs Pillow: pip install 'chairlift[vision]'"
        ) from error
    pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _limit(text: str) -> int:
    limits = _dictionary(_LIMIT_FLAG, text)
    limit = limits.get("image")
    if not all(type(each) is int and each >= 0 for each in limits.values()) or limit is None:
        raise UsageError(f"{_LIMIT_FLAG} must be a dictionary like {LIMITS}, not {text[:100]}")
    return int(limit)


def _buckets(text: str) -> dict[Size, float]:
    """The sizes whose probability is not 0."""
    wrong = UsageError(f"{_BUCKET_FLAG} must be a dictionary like {BUCKETS}, not {text[:100]}")
    found: dict[Size, float] = {}
    for key, weight in _dictionary(_BUCKET_FLAG, text).items():
        # JSON has strings only: "(256, 256, 1)".
        size = _literal(key) if isinstance(key, str) else key
        if not isinstance(size, tuple) or [type(each) for each in size] != [int] * 3:
            raise wrong
        if min(size) < 1 or type(weight) not in (int, float) or not 0 <= weight < math.inf:
            raise wrong
        if weight and size[2] > 1:
            raise UsageError(f"{_BUCKET_FLAG} {size}: videos are not supported, only one frame")
        if weight:
            found[Size(*size[:2])] = weight
    if not found:
        raise wrong
    return found


def _dictionary(flag: str, text: str) -> dict[Any, Any]:
    value = _literal(text)
    if not isinstance(value, dict):
        raise UsageError(f"{flag} must be a dictionary, not {text[:100]}")
    return value


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
