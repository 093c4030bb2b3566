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
from support.api.server_process import PATIENCE, ServerProcess, server_process

pytestmark = pytest.mark.system
LENGTH, MIN_TOKENS = 500, 200


async def reply(server: ServerProcess, body: dict[str, Any], kill: bool = False) -> str:
    """The text of a streamed completion; with ``kill``, its engine is killed near the beginning."""
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
                    kill = False
                    os.kill(await server.engine(), signal.SIGKILL)
    assert not kill
    return text


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
        assert await reply(server, body, kill=True) == expected
        assert await server.engine() != engine
