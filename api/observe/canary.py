"""The canary: replays finished rows alone now and then, and counts rows whose tokens differ.

A row's tokens must not depend on the rest of the batch. Only computing a row again can check that
on the operator's machine and with the users' requests.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from chairlift.api.errors import GenerationFailed
from chairlift.engine.client.interface import EngineClient, TokenStream
from chairlift.engine.errors import ChairliftError
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.logs.setup import REQUEST_ID
from chairlift.engine.messages import MAX_PRIORITY, Submit, TokenOutput
from chairlift.metrics.recorder import Recorder

logger = logging.getLogger(__name__)

# A replay compares at most the first this many output tokens.
MAX_TOKENS = 1024
# A waiting replay checks at this interval whether the engine is idle.
POLL_SECONDS = 0.1
# An interrupted replay is tried this many times; a long row must not block all later ones.
ATTEMPTS = 3


class FinishedRow(NamedTuple):
    """One choice of a finished request: the request, its id in the logs, and the output tokens."""

    request: Submit
    request_id: str | None
    choice: int
    tokens: list[int]

    def replay(self) -> Submit:
        """The request that replays the row: at the lowest priority and without cached prefixes."""
        params = self.request.params
        name = uuid.uuid4().hex
        return Submit(
            f"canary-{name}",
            self.request.prompt,
            msgspec.structs.replace(
                params,
                seed=params.seed + self.choice,
                max_tokens=len(self.tokens),
                logprobs=None,
            ),
            arrival=time.monotonic(),
            cache_salt=f"canary-{name}",
            priority=MAX_PRIORITY,
            replay=True,
            adapter=self.request.adapter,
        )

    def divergence(self, tokens: list[int]) -> int | None:
        """The first position where a replay's output tokens differ, or None."""
        pairs = zip_longest(self.tokens, tokens)
        return next((at for at, (original, other) in enumerate(pairs) if original != other), None)


class Canary:
    """Records one row of the users' requests every ``interval`` seconds, and replays it.

    A replay starts when the engine is idle and is cancelled as soon as a user submits a request.
    After ATTEMPTS cancelled replays the row is dropped. Only one row is in memory at a time.
    """

    def __init__(self, client: EngineClient, recorder: Recorder, interval: float) -> None:
        self._client = client
        self._recorder = recorder
        self._interval = interval
        self._row_future: asyncio.Future[FinishedRow] | None = None
        self._recording: RecordedStream | None = None
        self._replay: TokenStream | None = None

    def submit(self, request: Submit) -> TokenStream:
        """Submits a user's request, see ``EngineClient.submit``, and cancels a running replay."""
        if self._replay is not None:
            self._replay.close()
        stream = self._client.submit(request)
        if self._row_future is None or self._row_future.done():
            return stream
        if self._recording is not None and not self._recording.ended:
            return stream
        if not request.params.max_tokens:
            return stream  # it generates no tokens to compare
        self._recording = RecordedStream(stream, request, self._row_future)
        return self._recording

    async def run(self) -> None:
        """Checks rows until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            row = await self._next_row()
            try:
                await self._check(row)
            except Exception as error:  # a failed replay must not stop the canary
                logger.error("a row could not be replayed: %s", redacted_traceback(error))

    async def _next_row(self) -> FinishedRow:
        self._row_future = asyncio.get_running_loop().create_future()
        try:
            return await self._row_future
        finally:
            self._row_future = self._recording = None

    async def _check(self, row: FinishedRow) -> None:
        for _ in range(ATTEMPTS):
            await self._idle()
            if not self._has_adapter(row):
                logger.debug("the adapter of a row is unloaded, so it is not replayed")
                return
            tokens = await self._tokens_alone(row)
            if tokens is not None:
                self._compare(row, tokens)
                return
        logger.debug("the engine was never idle for long enough to replay a row")

    async def _idle(self) -> None:
        # The engine client sends no event when it becomes idle.
        while self._client.unfinished or self._client.unhealthy is not None:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    def _has_adapter(self, row: FinishedRow) -> bool:
        adapters, key = self._client.adapters, row.request.adapter
        return not key or (adapters is not None and adapters.has(key))

    def _compare(self, row: FinishedRow, tokens: list[int]) -> None:
        at = row.divergence(tokens)
        self._recorder.record_canary(diverged=at is not None)
        if at is not None:
            logger.error(
                "a row's replay alone gave another token",
                extra={
                    "request_id": row.request_id,
                    "choice": row.choice,
                    "position": at,
                    "prompt_tokens": len(row.request.prompt),
                },
            )

    async def _tokens_alone(self, row: FinishedRow) -> list[int] | None:
        """The tokens of a replay, or None if it was cancelled or refused.

        Raises:
            GenerationFailed: the replay failed; it may have brought the engine down.
        """
        tokens: list[int] = []
        finished = False
        try:
            self._replay = self._client.submit(row.replay())
            async for outputs in self._replay:
                for output in outputs:
                    if output.finish == "error":
                        raise GenerationFailed(output.error)
                    tokens += output.token_ids
                    finished = output.finish in ("stop", "length")
        except ChairliftError as error:
            logger.debug("a replay failed: %s", error)
        finally:
            if self._replay is not None:
                self._replay.close()
            self._replay = None
        return tokens if finished else None


class RecordedStream:
    """Forwards a user's stream unchanged, and records one of its choices as a FinishedRow."""

    def __init__(
        self, stream: TokenStream, request: Submit, row_future: asyncio.Future[FinishedRow]
    ) -> None:
        self._stream = stream
        self._row = FinishedRow(request, REQUEST_ID.get(), random.randrange(request.n), [])
        self._row_future = row_future
        self.ended = False

    async def __aiter__(self) -> AsyncIterator[list[TokenOutput]]:
        async for outputs in self._stream:
            for output in outputs:
                if output.index == self._row.choice and not self.ended:
                    self._take(output)
            yield outputs

    @property
    def waiting(self) -> int:
        """See ``TokenStream.waiting``."""
        return self._stream.waiting

    def stop(self, index: int) -> None:
        """See ``TokenStream.stop``."""
        self._stream.stop(index)
        if index == self._row.choice:
            self._end(complete=True)

    def close(self) -> None:
        """See ``TokenStream.close``."""
        self._stream.close()
        self._end(complete=False)

    def _take(self, output: TokenOutput) -> None:
        tokens = self._row.tokens
        tokens += output.token_ids[: MAX_TOKENS - len(tokens)]
        if output.finish is not None:
            self._end(complete=output.finish in ("stop", "length"))

    def _end(self, complete: bool) -> None:
        if complete and not self.ended and not self._row_future.done():
            self._row_future.set_result(self._row)
        self.ended = True
