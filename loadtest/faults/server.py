"""Runs a real ``chairlift serve`` as a child process, with access to its engine process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp

from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.faults.streams import metric
from chairlift.loadtest.servers import peers, procfs
from chairlift.loadtest.servers.child import ChildServer

START_LIMIT = 180.0
_POLL_SECONDS = 0.05


class Health(NamedTuple):
    """The fields of GET /health."""

    status: int
    reason: str | None


class FaultServer:
    """Serves ``model`` with additional ``flags`` for the duration of an ``async with``.

    Entering waits until the server is healthy. It needs /proc to find the engine process, which is
    the server's only child except for its workers.

    Args:
        model: the model's path.
        flags: flags of ``chairlift serve``.
        while_starting: awaited while the server starts.

    Raises:
        ServerError: it did not start, or there is no /proc.
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        while_starting: Callable[[FaultServer], Awaitable[None]] | None = None,
    ) -> None:
        if not procfs.available():
            raise ServerError("this needs a /proc to find the engine's process")
        spec = peers.ours(model)
        self.spec = replace(spec, command=[*spec.command, *flags])
        self._child = ChildServer(self.spec, START_LIMIT)
        self._while_starting = while_starting

    @property
    def pid(self) -> int:
        """The API process."""
        return self._child.pid

    @property
    def engine(self) -> int | None:
        """The id of the engine process, or None while there is none."""
        return next(iter(procfs.without_workers(procfs.tree(self.pid)[1:])), None)

    @property
    def log_tail(self) -> str:
        """The end of the server's log, which tells why an engine has ended."""
        return self._child.log_tail

    async def __aenter__(self) -> Self:
        starting = asyncio.create_task(asyncio.to_thread(self._child.__enter__))
        try:
            if self._while_starting is not None:
                await self._while_starting(self)
            await starting
        except BaseException:
            # ``__aexit__`` will not be called, and the thread may still wait for the server.
            if self._child.started:
                await asyncio.to_thread(self._child.__exit__, *sys.exc_info())
            await asyncio.gather(starting, return_exceptions=True)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._child.__exit__, kind, error, trace)

    async def other_engine(self, than: int | None = None) -> int:
        """Waits for an engine process other than ``than``; returns its id.

        Raises:
            ServerError: there was none within ``START_LIMIT``.
        """
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            if self._child.started and (pid := self.engine) not in (None, than):
                return pid
            await asyncio.sleep(_POLL_SECONDS)
        raise ServerError(f"{self.spec.name} has no engine process")

    async def healthy(self) -> None:
        """Waits until the server has an engine that serves.

        Raises:
            ServerError: it had none within ``START_LIMIT``.
        """
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            if (await self.health()).status == HTTPStatus.OK:
                return
            await asyncio.sleep(_POLL_SECONDS)
        raise ServerError(f"{self.spec.name} has no engine that serves")

    async def signal_engine(self, number: signal.Signals) -> int:
        """Waits for an engine process and sends it a signal; returns its id."""
        pid = await self.other_engine()
        os.kill(pid, number)
        return pid

    async def exit_code(self) -> int:
        """Waits until the server has ended by itself; returns its exit code."""
        code = await asyncio.to_thread(self._child.wait)
        assert code is not None
        return code

    async def health(self) -> Health:
        """Reads GET /health."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.spec.base_url}/health") as reply,
        ):
            return Health(reply.status, (await reply.json()).get("reason"))

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return await metric(self.spec.base_url, name, **labels)
