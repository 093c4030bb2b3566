"""Runs all batches in the background: begins them, cancels and expires them, cleans up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from functools import partial

from aiohttp import web

from chairlift.api.admission.ratelimit import Account
from chairlift.api.errors import StorageUnavailable
from chairlift.api.openai.batches.batch_run import BatchRun, BatchTools
from chairlift.api.openai.batches.batch_table import Unfinished
from chairlift.api.openai.batches.dispatch import Reply, dispatch
from chairlift.api.openai.batches.lines import LineRules
from chairlift.api.openai.batches.replies import Batch
from chairlift.api.openai.batches.slots import Slots
from chairlift.api.openai.batches.storage import STORAGE, Storage
from chairlift.api.service import SERVICE, Service
from chairlift.engine.logs.redacted_traceback import redacted_traceback

logger = logging.getLogger(__name__)

# The interval of looking for batches that have expired, or that can run again, and of looking for
# new ones of other servers with the same folder while no batch is unfinished.
TICK_SECONDS = 1.0
IDLE_SECONDS = 5.0
CLEAN_SECONDS = 300.0
# A run that has failed by an error of this server or of its disk begins again after this time.
RETRY_SECONDS = 30.0


class BatchRunner:
    """Runs the batches of one server.

    Only batches of served models run; those of others wait for a server with their model, and
    those whose owner has no key any more wait until it has one.
    """

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._service: Service = app[SERVICE]
        self._storage: Storage = app[STORAGE]
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._waits: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._slots = Slots(self._limit, self._free_rows)
        self._cleaned = -CLEAN_SECONDS

    def wake(self) -> None:
        """Looks for new and cancelled batches at once."""
        self._wake.set()

    async def run(self) -> None:
        """Runs batches until it is cancelled. Results that are saved stay."""
        try:
            while True:
                self._wake.clear()
                unfinished = True
                try:
                    unfinished = await self._tick()
                except StorageUnavailable as error:
                    logger.debug("batches cannot run: %s", error)
                except Exception as error:
                    logger.error("batches stand still: %s", redacted_traceback(error))
                    await asyncio.sleep(RETRY_SECONDS)
                try:
                    async with asyncio.timeout(TICK_SECONDS if unfinished else IDLE_SECONDS):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            await _cancel(*self._runs.values())

    async def _tick(self) -> bool:
        """Begins and ends runs; returns whether any batch is unfinished."""
        if not self._storage.is_open:
            # A server that never used files leaves the folder alone.
            if not self._service.settings.file_dir_bytes or not await self._storage.exists():
                return False
            await self._storage.open()
        self._runs = {name: run for name, run in self._runs.items() if not run.done()}
        now = time.time()
        if time.monotonic() - self._cleaned >= CLEAN_SECONDS:
            self._cleaned = time.monotonic()
            await self._clean(now)
        unfinished = await self._storage.run(lambda tables: tables.batches.unfinished())
        for entry in unfinished:
            batch = entry.batch
            is_over = batch.status == "cancelling" or now >= batch.expires_at
            is_running = batch.id in self._runs
            if is_over and not (is_running and batch.status == "finalizing"):
                await self._end(batch)
            elif not is_running and self._can_run(entry):
                logger.info("batch %s (%s) runs", batch.id, batch.status)
                self._runs[batch.id] = asyncio.create_task(self._run(entry))
        self._service.recorder.record_batches_running(len(self._runs))
        return bool(unfinished)

    def _can_run(self, entry: Unfinished) -> bool:
        models = self._service.models
        return (
            models.is_started
            and entry.batch.model in models.names
            and self._service.accounts.batch_account(entry.owner) is not None
            and time.monotonic() >= self._waits.get(entry.batch.id, 0.0)
            and not self._service.drain.draining
        )

    async def _run(self, entry: Unfinished) -> None:
        batch = entry.batch
        account = self._service.accounts.batch_account(entry.owner)
        assert account is not None, "it can run"
        recorder = self._service.recorder
        tools = BatchTools(
            self._storage,
            self._slots,
            partial(self._answer, account, batch.endpoint),
            self._rules(batch),
            recorder.record_batch_request,
        )
        try:
            self._note_end(await BatchRun(batch, tools).run())
        except Exception as error:
            self._waits[batch.id] = time.monotonic() + RETRY_SECONDS
            logger.error(
                "batch %s stopped and begins again in %g s: %s",
                *(batch.id, RETRY_SECONDS, redacted_traceback(error)),
            )
        finally:
            self.wake()

    async def _answer(self, account: Account, path: str, body: bytes, request_id: str) -> Reply:
        recorder = self._service.recorder
        recorder.record_batch_requests_running(1)
        try:
            return await dispatch(self._app, account, path, body, request_id)
        finally:
            recorder.record_batch_requests_running(-1)

    async def _end(self, batch: Batch) -> None:
        """Ends a batch that is cancelled or has expired; the results so far are kept."""
        if (run := self._runs.pop(batch.id, None)) is not None:
            await _cancel(run)
        rules = self._rules(batch)
        unfinished = await self._storage.run(lambda tables: tables.batches.unfinished())
        # The run may have ended it in the meantime.
        if any(entry.batch.id == batch.id for entry in unfinished):
            self._note_end(
                await self._storage.run(
                    lambda tables: tables.batches.finish(batch.id, rules.max_line_bytes)
                )
            )

    def _note_end(self, batch: Batch | None) -> None:
        if batch is None:
            return
        self._service.recorder.record_batch(batch.status)
        counts = batch.request_counts
        logger.info(
            "batch %s is %s: %d of %d requests completed, %d failed",
            *(batch.id, batch.status, counts.completed, counts.total, counts.failed),
        )

    async def _clean(self, now: float) -> None:
        deleted = await self._storage.run(lambda tables: tables.files.delete_expired(now))
        await self._storage.run(lambda tables: tables.batches.forget_old(now))
        if deleted:
            logger.info("deleted %d files that have expired", deleted)

    def _rules(self, batch: Batch) -> LineRules:
        settings = self._service.settings
        return LineRules(
            *(batch.endpoint, self._service.models.request_names),
            *(settings.max_body_bytes, settings.max_batch_requests),
        )

    def _limit(self) -> int:
        chosen = self._service.settings.batch_concurrency
        return chosen or max(1, self._rows() // 2)

    def _free_rows(self) -> int:
        models = self._service.loaded_models
        return self._rows() - sum(model.client.unfinished for model in models)

    def _rows(self) -> int:
        return sum(model.info.max_rows for model in self._service.loaded_models) or 1


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancels tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def batches_running(app: web.Application) -> AsyncIterator[None]:
    """Runs the batches while the application runs, and then closes the folder."""
    task = asyncio.create_task(app[BATCH_RUNNER].run())
    yield
    await _cancel(task)
    await app[STORAGE].close()


BATCH_RUNNER: web.AppKey[BatchRunner] = web.AppKey("batch_runner", BatchRunner)
