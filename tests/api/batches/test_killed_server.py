"""A server that is killed or stopped in the middle of a batch: the next one continues it."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types import Batch
from support.api.server_process import ServerProcess, server_process, until

pytestmark = pytest.mark.system

REQUESTS = 120
PATIENCE = 240.0


def requests() -> bytes:
    lines = []
    for number in range(REQUESTS):
        body = {"prompt": f"{number} is", "max_tokens": 8 + number % 40, "ignore_eos": True}
        line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line))
    return "\n".join(lines).encode()


def client_of(server: ServerProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-")


async def until_completed(client: AsyncOpenAI, batch_id: str, completed: int) -> Batch:
    """Waits until so many requests have a result, or the batch has ended."""
    async with asyncio.timeout(PATIENCE):
        while True:
            batch = await client.batches.retrieve(batch_id)
            counts = batch.request_counts
            assert counts is not None
            if counts.completed >= completed or batch.status in ("completed", "failed"):
                return batch
            await asyncio.sleep(0.05)


async def results(client: AsyncOpenAI, batch: Batch) -> list[dict[str, Any]]:
    content = await client.files.content(batch.output_file_id or "")
    return [json.loads(line) for line in content.text.splitlines()]


async def test_a_batch_survives_kills_of_its_server(tiny: Path, tmp_path: Path) -> None:
    # Few at a time, so that many are left whenever this process gets to see the counts.
    flags = ("--file-dir", str(tmp_path / "files"), "--batch-concurrency", "8")
    batch_id = ""
    # Each server is killed a little later in the batch; the last one ends it.
    for stop_at, ends in (
        (20, signal.SIGKILL),
        (40, signal.SIGKILL),
        (60, signal.SIGTERM),
        (REQUESTS, None),
    ):
        with server_process(tmp_path, tiny, *flags) as server:
            await server.healthy()
            async with client_of(server) as client:
                if not batch_id:
                    file = await client.files.create(file=("in", requests()), purpose="batch")
                    batch = await client.batches.create(
                        input_file_id=file.id,
                        endpoint="/v1/completions",
                        completion_window="24h",
                    )
                    batch_id = batch.id
                batch = await until_completed(client, batch_id, stop_at)
                counts = batch.request_counts
                assert counts is not None
                if ends is not None:
                    assert counts.completed < REQUESTS, "it was not in the middle"
                    server.signal(ends)
                    code = await server.exit_code()
                    assert code == (0 if ends == signal.SIGTERM else -signal.SIGKILL)
                    continue
                while batch.status != "completed":
                    await asyncio.sleep(0.05)
                    batch = await client.batches.retrieve(batch_id)
                found = await results(client, batch)
                assert [line["custom_id"] for line in found] == [f"r{n}" for n in range(REQUESTS)]
                assert len({line["id"] for line in found}) == REQUESTS
                for number, line in enumerate(found):
                    assert line["response"]["status_code"] == 200
                    usage = line["response"]["body"]["usage"]
                    assert usage["completion_tokens"] == 8 + number % 40
                assert batch.error_file_id is None
                assert batch.request_counts is not None
                assert batch.request_counts.completed == REQUESTS
        assert "Traceback" not in server.said


async def test_a_second_server_on_the_folder_does_not_start(tiny: Path, tmp_path: Path) -> None:
    flags = ("--file-dir", str(tmp_path / "files"))
    lock = tmp_path / "files" / "lock"
    with server_process(tmp_path, tiny, *flags) as first:
        await until(lambda: lock.exists() and lock.read_text() == str(first.process.pid))
        with server_process(tmp_path, tiny, *flags) as second:
            assert await second.exit_code() == 1
            error = f"is in use by another server (process {first.process.pid})"
            assert error in second.said
            assert "Traceback" not in second.said
