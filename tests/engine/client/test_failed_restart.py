"""A real server whose engine cannot be restarted reports why, and exits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.tiny import tiny_model_dir

from chairlift.loadtest.faults.server import FaultServer

pytestmark = pytest.mark.system
PATIENCE = 180.0


def stream_events(url: str) -> list[dict[str, Any]]:
    """The events of a stream of 4000 tokens, read to its end."""
    body = {"prompt": "ab", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        lines = [line.decode().strip() for line in reply]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def test_a_server_whose_engine_cannot_be_restarted_exits(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path, "llama")
    flags = ("--engine-start-attempts", "2")
    async with FaultServer(model, *flags, while_starting=kill_engine) as server:
        assert await server.metric("chairlift_engine_restarts_total", reason="start") == 1
        events = asyncio.create_task(asyncio.to_thread(stream_events, server.spec.base_url))
        await asyncio.sleep(0.5)
        (model / "config.json").unlink()
        await server.signal_engine(signal.SIGKILL)
        healths = []
        with contextlib.suppress(aiohttp.ClientError):
            while True:
                healths.append(await server.health())
                await asyncio.sleep(0.05)
        reasons = {health.reason for health in healths if health.status == 503}
        assert any("being restarted: the engine process ended with signal 9" in r for r in reasons)
        assert any("has no config.json" in r for r in reasons)
        (*_, last) = await events
        assert "has no config.json" in last["error"]["message"]
        assert await server.exit_code() == 1


async def kill_engine(server: FaultServer) -> None:
    await server.signal_engine(signal.SIGKILL)
