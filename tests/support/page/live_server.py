"""The page around a scripted engine with many rows, and a history that is written in advance."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.api.api_server import Running, engine_replying, running
from support.api.fake_engine import model_info, step_stats

from chairlift.api.observe.history import INTERVAL_SECONDS, History, Moment

ROWS = 256
RIDERS = 40
# The intervals of the written history: before, down, restarted in, and with failed requests.
COUNT, DOWN, RESTARTED, FAILED = 400, range(200, 220), 219, 300
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1900, "stream": True}


@dataclass
class Served:
    """A server in a thread of its own."""

    ready: threading.Event = field(default_factory=threading.Event)
    server: Running = field(init=False)
    loop: asyncio.AbstractEventLoop = field(init=False)
    end: asyncio.Event = field(init=False)

    def call(self, work: Callable[[], object]) -> None:
        """Runs ``work`` in the server's thread."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (work(), done.set()))
        assert done.wait(10)

    async def serve(self) -> None:
        engine = engine_replying("Hello there " * 150, step_seconds=0.1)
        engine.info = model_info(max_rows=ROWS, max_queue=5000)
        async with running(engine) as self.server:
            self.loop, self.end = asyncio.get_running_loop(), asyncio.Event()
            self.server.service.live.history = written_history()
            replies = [
                asyncio.create_task(self.server.events("/v1/chat/completions", CHAT))
                for _ in range(RIDERS)
            ]
            self.ready.set()
            await self.end.wait()
            for reply in replies:
                reply.cancel()
            await asyncio.gather(*replies, return_exceptions=True)


def written_history() -> History:
    """A busy server: it was down for a while, and later two requests failed."""
    now = Moment.now()
    began = COUNT * INTERVAL_SECONDS
    history = History(Moment(now.at - began, now.awake - began))
    for index in range(COUNT):
        if index not in DOWN:
            stats = step_stats([0.02] * 99)
            stats.running = ROWS // 2
            history.add_step(stats)
        history.current.restarts = index == RESTARTED
        history.current.failed = 2 * (index == FAILED)
        ago = began - (index + 1) * INTERVAL_SECONDS
        history.end_interval(Moment(now.at - ago, now.awake - ago), index not in DOWN, 1024)
    return history


@contextmanager
def served() -> Iterator[Served]:
    each = Served()
    thread = threading.Thread(target=lambda: asyncio.run(each.serve()))
    thread.start()
    try:
        assert each.ready.wait(60)
        yield each
    finally:
        each.loop.call_soon_threadsafe(each.end.set)
        thread.join()
