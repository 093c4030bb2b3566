"""min_tokens holds back stop strings also if the engine is killed within these tokens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.api.server_process import PATIENCE, ServerProcess, server_process, until

pytestmark = pytest.mark.system
LENGTH, MIN_TOKENS = 500, 200
ATTEMPTS = 10  # a busy machine shows the client a reply when it is nearly complete
IN_TIME = "; 1 choices wait"  # what the server says of an engine that ended before the reply did


async def reply(server: ServerProcess, body: dict[str, Any], kill: int | None = None) -> str:
    """The text of a streamed completion; ``kill``, a process, is killed near its beginning."""
    text = ""
    body = {"prompt": "To be", "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, **body}
    async with aiohttp.ClientSession() as http, asyncio.timeout(PATIENCE):
        url = f"{server.url}/v1/completions"
        async with http.post(url, json={**body, "stream": True}) as response:
            assert response.status == 200
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
                if kill and text:
                    os.kill(kill, signal.SIGKILL)
                    kill = None
    assert kill is None
    return text


async def next_engine(server: ServerProcess, engine: int) -> int:
    """Waits until another engine than the given one runs; returns its process id."""
    await until(lambda: server.engines not in ([], [engine]))
    await server.healthy()
    return await server.engine()


async def test_a_killed_engine_with_drafts(tiny: Path, tmp_path: Path) -> None:
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    with server_process(tmp_path, tiny, "--kv-memory", "32M", *drafts) as server:
        await server.healthy()
        early = await reply(server, {"max_tokens": MIN_TOKENS})
        text = await reply(server, {})
        assert text.startswith(early.rstrip("\ufffd"))
        # A character that is in both parts; only the later one may end the reply.
        late = text[len(early) :]
        stop = next(letter for letter in late if letter in early and letter != "\ufffd")
        body = {"stop": [stop], "min_tokens": MIN_TOKENS}
        expected = early + late[: late.index(stop)]
        assert await reply(server, body) == expected
        engine = await server.engine()
        for _ in range(ATTEMPTS):
            assert await reply(server, body, kill=engine) == expected
            engine = await next_engine(server, engine)
            if IN_TIME in server.said:
                break
        assert IN_TIME in server.said
