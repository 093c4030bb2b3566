"""The real server at its limits: a full queue, SIGTERM under load, a truncated model file."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from support.api.server import (
    CHAIRLIFT,
    PATIENCE,
    lenient,
    serving,
    until_metric,
)
from support.models import GGUF_VOCAB_SIZE, write_tiny_gguf
from support.tiny import tiny_model

from chairlift.loadtest.servers.ports import free_port

pytestmark = pytest.mark.system
# Far more tokens than any test waits for.
ENDLESS = 4000
IGNORE_EOS: Mapping[str, Any] = {"extra_body": {"ignore_eos": True}}


async def test_a_full_queue_is_a_429_until_there_is_room(tiny: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(tiny), "--max-rows", "1", "--max-queue", "1") as server:
        async with server.client() as client:
            ask = {"model": tiny.name, "prompt": "ab", "temperature": 0}
            endless = {**ask, "max_tokens": ENDLESS, "stream": True, **IGNORE_EOS}
            running = await lenient(client).completions.create(**endless)
            waiting = await lenient(client).completions.create(**endless)
            with pytest.raises(openai.RateLimitError) as refusal:
                await client.completions.create(max_tokens=4, **ask)
            assert int(refusal.value.response.headers["Retry-After"]) > 0
            assert refusal.value.code == "queue_full"
            await running.close()
            await waiting.close()
            await until_metric(server, "vllm:request_success_total", 2, finished_reason="abort")
            reply = await client.completions.create(max_tokens=4, **ask, **IGNORE_EOS)
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 4
        rejected = server.metrics().total("chairlift_requests_rejected_total", reason="queue_full")
        assert rejected == 1


async def test_sigterm_lets_streams_finish_within_the_drain_timeout(
    tiny: Path, tmp_path: Path
) -> None:
    ask = {"model": tiny.name, "prompt": "ab", "temperature": 0, **IGNORE_EOS}
    with serving(tmp_path, str(tiny), "--max-rows", "32", "--drain-timeout", "2") as server:
        async with server.client() as client:
            # Never read, and larger than the socket's buffers, so it never ends.
            unread = await lenient(client).completions.create(
                max_tokens=ENDLESS, n=24, stream=True, **ask
            )
            short = await lenient(client).completions.create(max_tokens=20, stream=True, **ask)
            async with short:
                chunks = aiter(short)
                await anext(chunks)
                server.process.terminate()
                finishes = [chunk.choices[0].finish_reason async for chunk in chunks]
            assert finishes[-1] == "length"
            assert await asyncio.to_thread(server.process.wait, PATIENCE) == 0
            await unread.close()


@pytest.mark.parametrize("kept", [0.01, 0.99], ids=["header cut", "weights cut"])
def test_a_truncated_file_is_one_line_and_exit_code_1(kept: float, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    write_tiny_gguf(cut, "llama", tiny_model("llama", vocab_size=GGUF_VOCAB_SIZE))
    os.truncate(cut, int(cut.stat().st_size * kept))
    done = subprocess.run(
        [CHAIRLIFT, "serve", str(cut), "--port", str(free_port()), "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("chairlift: error: ")
    assert "cut.gguf" in line
