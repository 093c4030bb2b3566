"""Rate limits of each key: requests and tokens a minute, concurrent streams."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from aiohttp import web

from chairlift.api.admission.keys import KeyLimits
from chairlift.api.errors import RateLimited
from chairlift.engine.errors import RequestError

Clock = Callable[[], float]
# The end of a stream is unknown, so clients should retry soon.
STREAM_RETRY_SECONDS = 1.0


class Bucket:
    """A token bucket: it begins full, and refills at ``limit`` units a minute up to ``limit``.

    Its level may become negative.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._at = clock()

    def resize(self, limit: int) -> None:
        """Changes the limit; units already taken count against the new one."""
        self._level = self.level + limit - self.limit
        self._at = self._clock()
        self.limit = limit

    @property
    def level(self) -> float:
        """The number of units available now; may be negative."""
        return min(self.limit, self._level + (self._clock() - self._at) * self.limit / 60)

    def take(self, amount: int) -> None:
        """Takes ``amount`` units, even if fewer are available."""
        self._level = self.level - amount
        self._at = self._clock()

    def wait(self, amount: int) -> float:
        """Seconds until ``amount`` units are available; 0 if they are available now."""
        return max(0.0, (amount - self.level) * 60 / self.limit)


class Account:
    """A key's usage: ``check`` tests if a request may begin, and ``begin`` and ``end`` count it."""

    def __init__(self, name: str, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        self.name = name
        self.streams = 0
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.limit(limits)

    def limit(self, limits: KeyLimits) -> None:
        """Sets the limits; usage so far counts against them."""
        self._max_streams = limits.max_streams
        self._requests = self._resized(self._requests, limits.rpm)
        self._tokens = self._resized(self._tokens, limits.tpm)

    def take_request(self) -> None:
        """Counts an arriving request.

        Raises:
            RateLimited: it exceeds the limit, and is not counted.
        """
        bucket = self._requests
        if bucket is None:
            return
        if wait := bucket.wait(1):
            raise RateLimited("requests", f"{bucket.limit} requests a minute", wait)
        bucket.take(1)

    def check(self, prompt_tokens: int, streams: int) -> None:
        """Checks whether a request with these numbers of prompt tokens and streams may begin now.

        Output tokens are counted while they are generated, because their number is unknown before.
        If they exceed the limit, they delay the key's next request.

        Raises:
            RateLimited: it may not begin now.
            RequestError: the request alone exceeds a limit, so it may never begin.
        """
        limit = self._max_streams
        if limit is not None and self.streams + streams > limit:
            if streams > limit:
                raise RequestError(f"{streams} choices at once; this key may have {limit}")
            raise RateLimited("streams", f"{limit} streams at once", STREAM_RETRY_SECONDS)
        bucket = self._tokens
        if bucket is None:
            return
        if prompt_tokens > bucket.limit:
            raise RequestError(
                f"{prompt_tokens} prompt tokens; this key may use {bucket.limit} tokens a minute"
            )
        if wait := bucket.wait(prompt_tokens):
            raise RateLimited("tokens", f"{bucket.limit} tokens a minute", wait)

    def begin(self, prompt_tokens: int, streams: int) -> None:
        """Counts a request that begins; ``end`` must be called for its streams."""
        self.streams += streams
        self.spend(prompt_tokens)

    def spend(self, tokens: int) -> None:
        """Counts computed tokens."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def end(self, streams: int) -> None:
        """Releases the streams of a request that has ended."""
        self.streams -= streams

    def _resized(self, bucket: Bucket | None, limit: int | None) -> Bucket | None:
        if limit is None:
            return None
        if bucket is None:
            return Bucket(limit, self._clock)
        bucket.resize(limit)
        return bucket

    def headers(self) -> dict[str, str]:
        """OpenAI's headers for the limits that are set."""
        headers: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{name}"] = duration(bucket.wait(bucket.limit))
        return headers


ACCOUNT: web.RequestKey[Account] = web.RequestKey("account", Account)


def duration(seconds: float) -> str:
    """Seconds in OpenAI's notation: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{math.ceil(rest * 10) / 10:g}s"
