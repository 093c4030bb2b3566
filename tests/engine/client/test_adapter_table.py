"""The client's record of adapters: names, keys, unloads that wait, and engines that restart."""

from __future__ import annotations

import asyncio

import pytest

from chairlift.engine.client.adapters import AdapterTable
from chairlift.engine.errors import AdapterError, EngineDead
from chairlift.engine.messages import (
    AdapterFailed,
    AdapterLoaded,
    LoadAdapter,
    ToEngine,
    UnloadAdapter,
)


class Engine:
    """Records what it is sent; ``used`` are the keys of its unfinished requests' adapters."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.used: list[str] = []
        self.table = AdapterTable(self.sent.append, lambda: self.used)

    async def load(self, name: str, path: str = "/a", replace: bool = False) -> str:
        """Loads an adapter; returns its key."""
        task = asyncio.create_task(self.table.load(name, path, replace))
        await asyncio.sleep(0)
        if task.done():
            await task
        message = self.sent[-1]
        assert isinstance(message, LoadAdapter)
        self.table.receive(AdapterLoaded(message.key, f"digest of {path}", 8))
        return (await task).key


async def test_a_name_is_taken_until_it_is_unloaded() -> None:
    engine = Engine()
    first = await engine.load("a")
    with pytest.raises(AdapterError, match="'a' is loaded already"):
        await engine.load("a")
    engine.table.unload("a")
    assert engine.sent[-1] == UnloadAdapter(first)
    assert await engine.load("a") != first
    with pytest.raises(KeyError):
        engine.table.unload("b")


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 257, "\x1b[1m", "a\0"])
async def test_names_are_short_and_printable(name: str) -> None:
    with pytest.raises(AdapterError, match="cannot name an adapter"):
        await Engine().table.load(name, "/a")


async def test_one_load_of_a_name_at_a_time() -> None:
    engine = Engine()
    task = asyncio.create_task(engine.table.load("a", "/a"))
    await asyncio.sleep(0)
    with pytest.raises(AdapterError, match="is being loaded"):
        await engine.table.load("a", "/b", replace=True)
    engine.table.receive(AdapterFailed("a#1", "/a: damaged"))
    with pytest.raises(AdapterError, match="/a: damaged"):
        await task
    assert not engine.table.loaded
    await engine.load("a")


async def test_an_unloaded_adapter_stays_until_its_requests_have_ended() -> None:
    engine = Engine()
    key = await engine.load("a")
    engine.used = ["", key, key]
    engine.table.unload("a")
    assert "a" not in engine.table.loaded
    assert not any(isinstance(message, UnloadAdapter) for message in engine.sent)
    engine.used = [key]
    engine.table.release()
    engine.table.restore()
    assert engine.sent[-1] == LoadAdapter(key, "/a", "digest of /a")
    engine.used = [""]
    engine.table.release()
    assert engine.sent[-1] == UnloadAdapter(key)
    engine.table.release()
    assert sum(isinstance(message, UnloadAdapter) for message in engine.sent) == 1


async def test_a_replaced_adapter_keeps_its_requests() -> None:
    engine = Engine()
    old = await engine.load("a")
    engine.used = [old]
    new = await engine.load("a", "/b", replace=True)
    assert engine.table.loaded["a"].key == new != old
    engine.used = []
    engine.table.release()
    assert engine.sent[-1] == UnloadAdapter(old)


async def test_a_new_engine_loads_all_adapters_with_their_digests() -> None:
    engine = Engine()
    keys = [await engine.load(name, f"/{name}") for name in "ab"]
    waiting = asyncio.create_task(engine.table.load("c", "/c"))
    await asyncio.sleep(0)
    engine.sent.clear()
    engine.table.restore()
    assert engine.sent == [
        LoadAdapter(keys[0], "/a", "digest of /a"),
        LoadAdapter(keys[1], "/b", "digest of /b"),
        LoadAdapter("c#3", "/c"),
    ]
    # One whose files have changed is lost; the other keeps its name and key.
    engine.table.receive(AdapterLoaded(keys[0], "digest of /a", 8))
    engine.table.receive(AdapterFailed(keys[1], "its files have changed"))
    assert [one.key for one in engine.table.loaded.values()] == [keys[0]]
    engine.table.fail_loading("the engine ended")
    with pytest.raises(EngineDead, match="the engine ended"):
        await waiting


async def test_after_the_last_engine_no_load_waits() -> None:
    engine = Engine()
    waiting = asyncio.create_task(engine.table.load("a", "/a"))
    await asyncio.sleep(0)
    engine.table.close("the engine failed to start")
    for load in (waiting, engine.table.load("b", "/b")):
        with pytest.raises(EngineDead, match="failed to start"):
            await asyncio.wait_for(load, 5)


async def test_a_caller_that_leaves_does_not_lose_the_adapter() -> None:
    engine = Engine()
    task = asyncio.create_task(engine.table.load("a", "/a"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    engine.table.receive(AdapterLoaded("a#1", "digest", 8))
    assert engine.table.loaded["a"].digest == "digest"
