"""Responses that are generated without a waiting client: polled, streamed later, or cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing

import msgspec
from aiohttp import web

from chairlift.api.admission.deadline import Deadline
from chairlift.api.errors import UnknownResponse, problem_of
from chairlift.api.generate.answer import log_failure
from chairlift.api.generate.generation import Generation
from chairlift.api.http.sse import framed
from chairlift.api.responses.formatter import ResponseFormatter
from chairlift.api.responses.replies import Response, StoredResponse
from chairlift.api.responses.store import ResponseStore
from chairlift.api.service import Service


class BackgroundResponse:
    """A response in progress. ``run`` generates it.

    Args:
        response: the response, which ``formatter`` completes.
        formatter: formats its events.
        inputs: the items before it, as in ``StoredResponse``.
        item_ids: the ids of these items.
        keeps_events: whether its events are kept, for streams.
    """

    def __init__(
        self,
        response: Response,
        formatter: ResponseFormatter,
        inputs: bytes,
        item_ids: tuple[str, ...],
        keeps_events: bool,
    ) -> None:
        self.response = response
        self._formatter = formatter
        self._inputs = inputs
        self._item_ids = item_ids
        self._events: list[bytes] | None = [] if keeps_events else None
        self._changed = asyncio.Event()
        self._is_done = False

    async def run(self, generation: Generation, deadline: Deadline) -> None:
        """Generates the response, and ends it as failed or cancelled if that is interrupted."""
        formatter = self._formatter
        self._add(formatter.queued())
        try:
            async with deadline.limit(), aclosing(generation.deltas()) as steps:
                async for deltas in steps:
                    if self.response.status == "queued":
                        self._add(formatter.opening(0))
                    for delta in deltas:
                        self._add(formatter.chunks(delta))
            self._add(formatter.closing(generation.usage()))
        except asyncio.CancelledError:
            # OpenAI's API has no event for it: the stream just ends.
            self.response.status = "cancelled"
        except Exception as error:
            problem = problem_of(error)
            log_failure(problem.status, error)
            self._add(formatter.failure(problem))
        finally:
            self.end()

    def end(self) -> None:
        """Notes that ``run`` has ended, or was cancelled before it began."""
        if self.response.status == "queued":
            self.response.status = "cancelled"
        self._is_done = True
        self._changed.set()

    def stored(self) -> StoredResponse:
        """The response as it is now, in the form of the store."""
        ids = (*self._item_ids, *(item.id for item in self.response.output))
        reply = msgspec.json.encode(self.response)
        events = None if self._events is None else tuple(self._events)
        return StoredResponse(self.response.id, reply, self._inputs, ids, events)

    async def events(self, start: int) -> AsyncIterator[list[bytes]]:
        """Yields the events from number ``start`` on, each framed, until the response has ended.

        Only if it keeps events.
        """
        assert self._events is not None, "the caller has checked it"
        while True:
            self._changed.clear()
            if new := self._events[start:]:
                start += len(new)
                yield new
            elif self._is_done:
                return
            else:
                await self._changed.wait()

    @property
    def keeps_events(self) -> bool:
        """Whether it can be streamed."""
        return self._events is not None

    def _add(self, events: Sequence[msgspec.Struct]) -> None:
        if self._events is not None:
            self._events += framed(self._formatter.framing, events)
            self._changed.set()


class BackgroundResponses:
    """All responses in progress. They end with the server.

    A response belongs to the account that created it.
    """

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store
        self._running: dict[tuple[str, str], BackgroundResponse] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def begin(
        self,
        owner: str,
        response: BackgroundResponse,
        generation: Generation,
        seconds: float | None,
    ) -> None:
        """Begins to generate a response; it is stored when it has ended.

        Args:
            owner: the name of its account.
            response: the response.
            generation: its generation, which has been submitted. It is closed at the end.
            seconds: the client's time limit, or None.

        Raises:
            Draining: the server is about to stop.
        """
        service = self._service
        key = owner, response.response.id
        with ExitStack() as stack:
            stack.callback(generation.close)
            # It counts as a running request: the server waits for it when it stops.
            limit = service.settings.request_seconds
            deadline = stack.enter_context(service.drain.admit(limit))
            deadline.tighten(seconds)
            stack.enter_context(service.live.riding(generation))
            # Called first. The task may be cancelled before it runs at all.
            stack.callback(self._end, key, response)
            task = asyncio.create_task(response.run(generation, deadline))
            self._running[key] = response
            self._tasks[key] = task
            held = stack.pop_all()
            task.add_done_callback(lambda task: held.close())

    def find(self, owner: str, response_id: str) -> BackgroundResponse | None:
        """The owner's response in progress with that id, or None."""
        return self._running.get((owner, response_id))

    def current(self, owner: str, response_id: str) -> StoredResponse:
        """Returns a response of this owner, in progress or stored.

        Raises:
            UnknownResponse: there is none.
        """
        running = self.find(owner, response_id)
        return self._store.get(owner, response_id) if running is None else running.stored()

    async def cancel(self, owner: str, response_id: str) -> StoredResponse:
        """Cancels a response if it is in progress, and returns it.

        Raises:
            UnknownResponse: there is none.
        """
        key = owner, response_id
        if (running := self._running.get(key)) is None:
            return self._store.get(owner, response_id)
        task = self._tasks[key]
        task.cancel()
        await asyncio.wait({task})
        return running.stored()

    async def delete(self, owner: str, response_id: str) -> None:
        """Deletes a response, and cancels it before if it is in progress.

        Raises:
            UnknownResponse: there is none.
        """
        if self.find(owner, response_id) is None:
            self._store.delete(owner, response_id)
            return
        await self.cancel(owner, response_id)
        try:
            self._store.delete(owner, response_id)
        except UnknownResponse:
            return  # the store had no room for it

    async def close(self) -> None:
        """Ends all responses in progress."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _end(self, key: tuple[str, str], response: BackgroundResponse) -> None:
        response.end()
        del self._running[key], self._tasks[key]
        self._store.put(key[0], response.stored())


BACKGROUND: web.AppKey[BackgroundResponses] = web.AppKey("background", BackgroundResponses)


async def background_running(app: web.Application) -> AsyncIterator[None]:
    """Ends the responses in progress when the application ends."""
    yield
    await app[BACKGROUND].close()
