"""Runs one batch: validates its file, answers its requests, saves each result."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec import Raw
from msgspec.structs import replace

from chairlift.api.errors import StorageUnavailable
from chairlift.api.openai.batches.batch_table import Result
from chairlift.api.openai.batches.dispatch import Reply
from chairlift.api.openai.batches.lines import (
    LineResponse,
    LineRules,
    RequestLine,
    Validation,
    numbered_lines,
    parse_line,
    result_line,
    validate,
)
from chairlift.api.openai.batches.replies import Batch, BatchError, BatchErrors, RequestCounts
from chairlift.api.openai.batches.slots import Slot, Slots
from chairlift.api.openai.batches.storage import Storage

logger = logging.getLogger(__name__)

# Requests of one batch in memory, running or waiting to be tried again, and their bytes.
MAX_OPEN = 256
MAX_OPEN_BYTES = 64 << 20
MAX_RETRY_SECONDS = 60.0
SAVE_RETRY_SECONDS = 5.0

# Answers a request of a batch: its JSON and its id in the log.
Answer = Callable[[bytes, str], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class BatchTools:
    """The objects that a run needs.

    Attributes:
        storage: the folder.
        slots: those of all batches.
        answer: answers a request with the account of the batch's owner.
        rules: what the lines must be.
        on_result: called with "completed" or "failed" once a result is saved.
    """

    storage: Storage
    slots: Slots
    answer: Answer
    rules: LineRules
    on_result: Callable[[str], None]


class BatchRun:
    """One run of a batch, from wherever the last one has stopped.

    Cancelling it leaves the batch as it is: results are saved one by one.
    """

    def __init__(self, batch: Batch, tools: BatchTools) -> None:
        self._batch = batch
        self._tools = tools
        self._open = _Open()
        self._unsaved: list[Result] = []
        self._saving = asyncio.Lock()

    async def run(self) -> Batch | None:
        """Runs the batch to its end and returns it; None if it has been changed meanwhile."""
        batch_id = self._batch.id
        storage, rules = self._tools.storage, self._tools.rules
        path = await storage.run(lambda tables: tables.folder.content(self._batch.input_file_id))
        if self._batch.status == "validating":
            validated = await self._validate(path)
            if validated is None or validated.status == "failed":
                return validated
        if self._batch.status != "finalizing":
            await self._answer_all(path)
            now = int(time.time())
            finalizing = await storage.run(
                lambda tables: tables.batches.change(
                    batch_id,
                    ("in_progress",),
                    lambda batch: replace(batch, status="finalizing", finalizing_at=now),
                )
            )
            if finalizing is None:
                return None
        return await storage.run(
            lambda tables: tables.batches.finish(batch_id, rules.max_line_bytes)
        )

    async def _validate(self, path: Path) -> Batch | None:
        try:
            validation = await asyncio.to_thread(validate, path, self._tools.rules)
        except OSError as error:
            problem = BatchError("input_file_unreadable", f"The input file: {error.strerror}.")
            validation = Validation(0, [problem])
        now = int(time.time())

        def checked(batch: Batch) -> Batch:
            if validation.errors:
                errors = BatchErrors(validation.errors)
                return replace(batch, status="failed", failed_at=now, errors=errors)
            counts = RequestCounts(validation.total)
            return replace(batch, status="in_progress", in_progress_at=now, request_counts=counts)

        return await self._tools.storage.run(
            lambda tables: tables.batches.change(self._batch.id, ("validating",), checked)
        )

    async def _answer_all(self, path: Path) -> None:
        """Answers all requests that have no result yet."""
        # A model that this server no longer has, such as an adapter, fails its own requests only.
        rules = dataclasses.replace(self._tools.rules, models=None)
        done = await self._tools.storage.run(
            lambda tables: tables.batches.lines_done(self._batch.id)
        )
        lines = numbered_lines(path, rules.max_line_bytes)
        async with asyncio.TaskGroup() as group:
            while (numbered := await asyncio.to_thread(next, lines, None)) is not None:
                number, text = numbered
                if number not in done:
                    line = await asyncio.to_thread(parse_line, number, text, rules)
                    await self._open.enter(len(line.body))
                    self._begin(group, line, await self._taken_slot(line))

    async def _taken_slot(self, line: RequestLine) -> Slot:
        slot = self._tools.slots.slot(line.choices)
        await slot.take()
        return slot

    def _begin(self, group: asyncio.TaskGroup, line: RequestLine, slot: Slot) -> None:
        task = group.create_task(self._answer(line, slot))

        def end(task: asyncio.Task[None]) -> None:
            # Also if the task was cancelled before it began.
            slot.release()
            self._open.leave(len(line.body))

        task.add_done_callback(end)

    async def _answer(self, line: RequestLine, slot: Slot) -> None:
        """Answers a request, whose slots are taken, and saves its result."""
        request_id = f"req_{uuid.uuid4().hex}"
        while True:
            reply = await self._tools.answer(line.body, request_id)
            slot.release()
            if reply.retry_after is None:
                break
            # The server could not run it. Other batches may have their turn meanwhile.
            await asyncio.sleep(min(reply.retry_after, MAX_RETRY_SECONDS))
            await slot.take()
        response = LineResponse(reply.status, request_id, Raw(reply.body))
        failed = reply.status >= 400
        await self._save(Result(line.number, failed, result_line(line.custom_id, response)))
        self._tools.on_result("failed" if failed else "completed")

    async def _save(self, result: Result) -> None:
        """Saves a result durably. Results that arrive meanwhile share the next transaction."""
        self._unsaved.append(result)
        async with self._saving:
            while result in self._unsaved:
                results = list(self._unsaved)
                try:
                    await self._write(results)
                except StorageUnavailable as error:
                    logger.error("results of %s cannot be saved yet: %s", self._batch.id, error)
                    await asyncio.sleep(SAVE_RETRY_SECONDS)
                    continue
                self._unsaved = self._unsaved[len(results) :]

    async def _write(self, results: list[Result]) -> None:
        await self._tools.storage.run(
            lambda tables: tables.batches.add_results(self._batch.id, results)
        )


class _Open:
    """Bounds the requests that are in memory. One task enters them."""

    def __init__(self) -> None:
        self._count = 0
        self._bytes = 0
        self._left = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Waits until a request of ``size`` bytes fits, and counts it."""
        while self._count and (self._count >= MAX_OPEN or self._bytes + size > MAX_OPEN_BYTES):
            self._left.clear()
            await self._left.wait()
        self._count += 1
        self._bytes += size

    def leave(self, size: int) -> None:
        """Uncounts a request of ``size`` bytes."""
        self._count -= 1
        self._bytes -= size
        self._left.set()
