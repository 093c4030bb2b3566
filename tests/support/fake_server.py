"""A small OpenAI-compatible server on a real socket, and a load test of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from chairlift.loadtest import cli
from chairlift.loadtest.servers.ports import free_port


@dataclass
class FakeServer:
    """An OpenAI-compatible server whose replies repeat the prompt's words.

    Attributes:
        batch_dependent: replies end in another word while other requests run.
        fail: refuses the prompts for which it returns True.
        break_off: ends the streams of the prompts for which it returns True with an error.
        token_seconds: time between two tokens.
        metrics: the text of /metrics; empty: 404.
        stall: a prompt, and the seconds for which its prefill delays all streams.
        bodies, headers: of the requests so far.
        running, peak: requests at this moment, and at most.
    """

    batch_dependent: bool = False
    fail: Callable[[str], bool] = lambda prompt: False
    break_off: Callable[[str], bool] = lambda prompt: False
    token_seconds: float = 0.0
    metrics: str = ""
    stall: tuple[str, float] = ("", 0.0)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    base_url: str = ""
    _gate: asyncio.Lock = field(default_factory=asyncio.Lock)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._models)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "folder/fake-model"}]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "9.8.7"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=200 if self.metrics else 404)

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["prompt"].split()
        return web.json_response({"tokens": list(range(len(tokens))), "count": len(tokens)})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        if self.fail(prompt):
            return web.json_response({"error": {"message": "no room for you"}}, status=429)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._stream(request, body, prompt, chat)
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], prompt: str, chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        limit = body["max_completion_tokens" if chat else "max_tokens"]
        words = prompt.split()
        await response.write(b": keep-alive\n\n")
        if prompt == self.stall[0]:
            # The prefill is one step: every stream waits for it.
            async with self._gate:
                await asyncio.sleep(self.stall[1])
        if chat:
            await self._send(response, {"delta": {"role": "assistant", "content": ""}})
        for number in range(limit):
            async with self._gate:
                pass
            await asyncio.sleep(self.token_seconds)
            text = f" {words[number % len(words)]}"
            if number == limit - 1 and self.batch_dependent and self.running > 1:
                text = " crowd"
            finish = "length" if number == limit - 1 else None
            await self._send(
                response,
                ({"delta": {"content": text}} if chat else {"text": text})
                | {"finish_reason": finish},
            )
            if self.break_off(prompt):
                error = b'data: {"error": {"message": "the engine has ended"}}\n\n'
                await response.write(error)
                return response
        usage = {"prompt_tokens": len(words), "completion_tokens": limit}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, choice: dict[str, Any]) -> None:
        event = f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n".encode()
        # In two writes, so that clients cannot take a chunk for an event.
        await response.write(event[:9])
        await response.write(event[9:])


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Serves ``fake`` from a thread, since the load test runs its own event loop."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(fake.app())

    async def start() -> None:
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        fake.base_url = f"http://127.0.0.1:{port}"

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def bench(fake: FakeServer, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(["--base-url", fake.base_url, *flags]))


SMALL = ("--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "5")
