"""How batches share the server: slots, keys that go, disks that fail, files that are in use."""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api.api_server import MESSAGES, Running, engine_replying, running, until
from support.api.credentials import ALICE, alice_and_bob

from chairlift.api.admission.keys import ApiKey
from chairlift.api.openai.batches import batch_run, output, runner
from chairlift.api.openai.batches.batch_table import BatchTable, Result
from chairlift.api.openai.batches.file_table import FileTable
from chairlift.api.openai.batches.slots import Slots

URL = "/v1/chat/completions"


async def begin(client: openai.AsyncOpenAI, requests: int) -> str:
    body = {"messages": MESSAGES}
    lines = [
        json.dumps({"custom_id": f"r{number}", "method": "POST", "url": URL, "body": body})
        for number in range(requests)
    ]
    file = await client.files.create(file=("in", "\n".join(lines).encode()), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h"
    )
    return batch.id


async def until_status(server: Running, batch_id: str, status: str, key: str = "-") -> Any:
    client = server.openai.with_options(api_key=key)
    async with asyncio.timeout(180):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status == status:
                return batch
            await asyncio.sleep(0.02)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 6))
def test_slots_are_bounded_and_first_come_first_served(
    sizes: list[int], limit: int, busy_rows: int
) -> None:
    begun: list[int] = []

    async def main() -> None:
        slots = Slots(lambda: limit, lambda: 6 - busy_rows - slots.used)

        async def use(number: int, choices: int) -> None:
            slot = slots.slot(choices)
            await slot.take()
            begun.append(number)
            # One request alone may exceed the limits.
            alone = slots.used == choices
            assert alone or slots.used <= min(limit, 6 - busy_rows)
            await asyncio.sleep(0)
            slot.release()
            slot.release()

        await asyncio.gather(*(use(number, size) for number, size in enumerate(sizes)))
        assert slots.used == 0

    asyncio.run(main())
    assert begun == sorted(begun)


@pytest.mark.slow
async def test_a_busy_engine_leaves_batches_one_request() -> None:
    engine = engine_replying("Hello", step_seconds=0.05)
    engine.unfinished = 8
    async with running(engine) as server:
        batch_id = await begin(server.openai, 8)
        most = 0
        while (await server.openai.batches.retrieve(batch_id)).status != "completed":
            now = server.metric("chairlift_num_batch_requests_running")
            most = max(most, int(now or 0))
        assert most == 1


async def test_results_wait_for_a_disk_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "SAVE_RETRY_SECONDS", 0.05)
    fails = 3
    add_results = BatchTable.add_results

    def add(table: BatchTable, batch_id: str, results: Iterable[Result]) -> None:
        nonlocal fails
        if fails:
            fails -= 1
            raise sqlite3.OperationalError("database or disk is full")
        add_results(table, batch_id, results)

    monkeypatch.setattr(BatchTable, "add_results", add)
    async with running(engine_replying("Hello")) as server:
        batch = await until_status(server, await begin(server.openai, 5), "completed")
        assert (fails, batch.request_counts.completed) == (0, 5)
        # No request was computed again.
        assert len(server.engine.submitted) == 5


async def test_a_run_that_breaks_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.05)
    fails = 1
    finish = BatchTable.finish

    def broken(table: BatchTable, batch_id: str, max_line_bytes: int) -> Any:
        nonlocal fails
        if fails:
            fails -= 1
            raise sqlite3.OperationalError("disk I/O error")
        return finish(table, batch_id, max_line_bytes)

    monkeypatch.setattr(BatchTable, "finish", broken)
    async with running(engine_replying("Hello")) as server:
        batch = await until_status(server, await begin(server.openai, 3), "completed")
        assert batch.request_counts.completed == 3
        assert len(server.engine.submitted) == 3


@pytest.mark.parametrize(
    ("owner", "name"), [(output, "add_usage"), (FileTable, "keep"), (FileTable, "insert")]
)
async def test_an_output_that_does_not_fit_the_disk_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Otherwise each further try would fill the disk more."""
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.05)
    work = getattr(owner, name)
    tries = 0

    def full(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        if 1 < tries < 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return work(*args)

    monkeypatch.setattr(owner, name, full)
    async with running(engine_replying("Hello")) as server:
        batch = await until_status(server, await begin(server.openai, 2), "completed")
        folder = server.service.settings.file_dir or Path()
        assert tries > 3
        assert list((folder / "incoming").iterdir()) == []
        names = {path.name for path in (folder / "contents").iterdir()}
        assert names == {batch.input_file_id, batch.output_file_id}


async def test_an_input_in_use_cannot_be_deleted() -> None:
    async with running(engine_replying("Hello", first_step_seconds=0.3)) as server:
        batch_id = await begin(server.openai, 2)
        batch = await server.openai.batches.retrieve(batch_id)
        with pytest.raises(openai.BadRequestError, match=f"input of {batch_id}"):
            await server.openai.files.delete(batch.input_file_id)
        await until_status(server, batch_id, "completed")
        await server.openai.files.delete(batch.input_file_id)


async def test_a_removed_input_fails_the_batch() -> None:
    async with running(engine_replying("Hello")) as server:
        file = await server.openai.files.create(file=("in", b"x"), purpose="batch")
        folder = server.service.settings.file_dir
        assert folder is not None
        (folder / "contents" / file.id).unlink()
        batch = await server.openai.batches.create(
            input_file_id=file.id, endpoint=URL, completion_window="24h"
        )
        failed = await until_status(server, batch.id, "failed")
        assert [error.code for error in failed.errors.data] == ["input_file_unreadable"]


async def test_a_batch_waits_for_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TICK_SECONDS", 0.05)
    alice, bob = alice_and_bob()
    engine = engine_replying("Hello")
    async with running(engine, keys=(alice, bob)) as server:
        batch_id = await _begin_unseen(server, bob)
        await asyncio.sleep(0.3)
        assert engine.submitted == []
        server.service.accounts.replace([alice, bob])
        await until_status(server, batch_id, "completed", ALICE)


async def _begin_unseen(server: Running, bob: ApiKey) -> str:
    """Begins a batch of ALICE, and takes her key away before it runs."""
    client = server.openai.with_options(api_key=ALICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.BatchRunner, "_can_run", lambda self, entry: False)
        batch_id = await begin(client, 3)
        server.service.accounts.replace([bob])
    return batch_id


async def test_cleaning_deletes_expired_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(runner, "CLEAN_SECONDS", 0.1)
    async with running(engine_replying("Hello")) as server:
        file = await server.openai.files.create(file=("in", b"x"), purpose="batch")
        await server.storage.run(
            lambda tables: tables.folder.database.execute("UPDATE files SET expires_at = 5")
        )
        folder = server.service.settings.file_dir
        assert folder is not None
        await until(lambda: not (folder / "contents" / file.id).exists())
        with pytest.raises(openai.NotFoundError):
            await server.openai.files.retrieve(file.id)
