"""The pool: what is loaded when, who waits, and what a failure costs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from support.api.fake_engine import FakeEngine
from support.api.simulated_models import SimulatedLoader, lazy, simulated, use
from support.virtual_time import run_virtually

from chairlift.api.errors import ModelBusy, NotReady, UnknownModel
from chairlift.api.models.entry import ModelPlan
from chairlift.api.models.lifecycle import (
    MAX_LOADS,
    MAX_RETRY_SECONDS,
    RETRY_SECONDS,
    TURN_SECONDS,
)
from chairlift.engine.errors import ModelError, QueueFull


def in_turn(*uses: Coroutine[Any, Any, float]) -> Coroutine[Any, Any, list[float]]:
    async def run() -> list[float]:
        return [await each for each in uses]

    return run()


def test_the_least_recently_used_model_makes_room() -> None:
    async def main() -> None:
        models = simulated([lazy("a"), lazy("b"), lazy("c")], 2)
        await in_turn(use(models, "a", 1), use(models, "b", 1), use(models, "a", 1))
        await use(models, "c", 1)
        assert models.log.unloads == [("b", "memory")]
        assert models.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        await models.pool.close()
        assert not any(loader.running for loader in models.loaders.values())

    run_virtually(main())


def test_a_model_with_work_stays_and_the_other_waits_for_it() -> None:
    async def main() -> None:
        models = simulated([lazy("a"), lazy("b")], 1)
        first = asyncio.create_task(use(models, "a", 5))
        await asyncio.sleep(2)
        assert 4 <= await use(models, "b", 1) <= 6
        assert await first == 1
        # Requests of the engine count, too, even if no handler has a lease.
        await use(models, "a", 0)
        model = models.entry("a").model
        assert model is not None
        assert isinstance(model.client, FakeEngine)
        model.client.unfinished = 1
        with pytest.raises(NotReady):
            await models.pool.acquire(models.entry("b"), 3)
        model.client.unfinished = 0
        await use(models, "b", 0)
        await models.pool.close()

    run_virtually(main())


def test_a_model_in_constant_use_gives_way_in_the_end() -> None:
    async def main() -> None:
        models = simulated([lazy("a"), lazy("b")], 1)
        stop = asyncio.Event()

        async def always(name: str, offset: float) -> int:
            await asyncio.sleep(offset)
            count = 0
            while not stop.is_set():
                await use(models, name, 1)
                count += 1
            return count

        busy = [asyncio.create_task(always("a", offset)) for offset in (0, 0.3, 0.6)]
        await asyncio.sleep(3)
        waited = await use(models, "b", 1)
        assert TURN_SECONDS <= waited <= TURN_SECONDS + 4
        await asyncio.sleep(5)
        assert models.entry("a").state == "loaded", "its users came back in turn"
        stop.set()
        await asyncio.gather(*busy)
        await models.pool.close()

    run_virtually(main())


def test_an_idle_model_is_unloaded_after_its_keep_alive_and_comes_back() -> None:
    async def main() -> None:
        models = simulated([lazy("a", keep_alive=30.0), lazy("b")], None)
        await in_turn(use(models, "a", 100), use(models, "b", 1))
        await asyncio.sleep(20)
        assert models.states() == {"a": "loaded", "b": "loaded"}
        await asyncio.sleep(20)
        assert models.states() == {"a": "unloaded", "b": "loaded"}
        assert models.log.unloads == [("a", "idle")]
        assert await use(models, "a", 1) == 1
        await models.pool.close()

    run_virtually(main())


def test_requests_that_come_together_share_one_load() -> None:
    async def main() -> None:
        models = simulated([lazy("a", max_waiting=20), lazy("b")], None)
        uses = [use(models, "a", 1) for _ in range(20)]
        waits = asyncio.gather(*uses)
        await asyncio.sleep(0.5)
        with pytest.raises(QueueFull):
            await models.pool.acquire(models.entry("a"), None)
        assert await waits == [1] * 20
        assert models.loaders["a"].began == 1
        await models.pool.close()

    run_virtually(main())


def test_a_model_that_has_failed_for_weeks_still_fails_its_requests() -> None:
    async def main() -> None:
        models = simulated([lazy("a")], 1, lambda n: SimulatedLoader(n, failures=1))
        entry = models.entry("a")
        entry.failures = 1100
        with pytest.raises(NotReady, match="a: damaged") as refused:
            await models.pool.acquire(entry, 60)
        assert refused.value.retry_after == MAX_RETRY_SECONDS
        await models.pool.close()

    run_virtually(main())


def test_a_failed_load_fails_its_requests_with_the_reason_and_no_others() -> None:
    async def main() -> None:
        models = simulated(
            [lazy("a"), lazy("b")],
            2,
            lambda n: SimulatedLoader(n, failures=2 if n == "a" else 0),
        )
        other = asyncio.create_task(use(models, "b", 30))
        for _ in range(3):
            with pytest.raises(NotReady, match="a: damaged") as refused:
                await models.pool.acquire(models.entry("a"), None)
            assert 0 < refused.value.retry_after <= RETRY_SECONDS
        assert models.loaders["a"].began == 1, "it is not tried again at once"
        await asyncio.sleep(RETRY_SECONDS)
        with pytest.raises(NotReady):
            await models.pool.acquire(models.entry("a"), None)
        assert models.entry("a").retry_at - asyncio.get_running_loop().time() > RETRY_SECONDS
        # An operator's load does not wait for that.
        await models.pool.load(models.entry("a"), None)
        assert models.log.failed == ["a", "a"]
        assert models.states() == {"a": "loaded", "b": "loaded"}
        await other
        assert models.pool.unhealthy is None
        await models.pool.close()

    run_virtually(main())


def test_a_load_that_would_take_too_long_is_refused_with_its_time() -> None:
    async def main() -> None:
        models = simulated([lazy("a", 10), lazy("b", 20)], 20, lambda n: SimulatedLoader(n, 8.0))
        # Nothing is known about the first load, so the request waits as long as it may.
        with pytest.raises(NotReady):
            await models.pool.acquire(models.entry("a"), 5)
        assert models.entry("a").state == "loading"
        await asyncio.sleep(5)
        assert models.entry("a").state == "loaded"
        # The other one is twice as large; with 16 predicted seconds, 10 are refused at once.
        loop = asyncio.get_running_loop()
        now = loop.time()
        with pytest.raises(NotReady) as refused:
            await models.pool.acquire(models.entry("b"), 10)
        assert (loop.time(), refused.value.retry_after) == (now, 16)
        assert models.loaders["b"].began == 0
        assert 8 <= await use(models, "b", 0, limit=20) <= 9
        await models.pool.close()

    run_virtually(main())


def test_an_engine_that_is_lost_for_good_costs_only_its_model() -> None:
    async def main() -> None:
        models = simulated([lazy("a"), lazy("b")], None)
        await in_turn(use(models, "a", 0), use(models, "b", 0))
        model = models.entry("a").model
        assert model is not None
        assert isinstance(model.client, FakeEngine)
        model.client.dead.set()
        await asyncio.sleep(1)
        assert models.states() == {"a": "failed", "b": "loaded"}
        assert models.pool.unhealthy is None
        with pytest.raises(NotReady, match="it was killed"):
            await models.pool.acquire(models.entry("a"), None)
        await asyncio.sleep(RETRY_SECONDS)
        await use(models, "a", 0)
        await models.pool.close()

    run_virtually(main())


def test_the_only_model_that_is_lost_ends_the_server_and_others_do_not() -> None:
    async def main() -> None:
        models = simulated([ModelPlan("a")], None)
        await models.pool.start()
        model = models.entry("a").model
        assert model is not None
        assert isinstance(model.client, FakeEngine)
        model.client.dead.set()
        assert await models.pool.ended() == "it was killed"
        assert "it was killed" in (models.pool.unhealthy or "")
        await models.pool.close()

    run_virtually(main())


def test_the_start_loads_the_eager_models_and_fails_with_the_first_reason() -> None:
    async def main() -> None:
        models = simulated([ModelPlan("a"), lazy("b"), ModelPlan("c")], None)
        await models.pool.start()
        assert models.pool.is_started
        assert models.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        await models.pool.close()
        models = simulated(
            [ModelPlan("a"), ModelPlan("b")], None, lambda n: SimulatedLoader(n, failures=n == "b")
        )
        with pytest.raises(ModelError, match=r"^b: damaged$"):
            await models.pool.start()
        assert not models.pool.is_started
        await models.pool.close()
        assert not any(loader.running for loader in models.loaders.values())

    run_virtually(main())


def test_unloading_on_request_refuses_a_model_with_work() -> None:
    async def main() -> None:
        models = simulated([lazy("a"), lazy("b")], None)
        entry = models.entry("a")
        await models.pool.unload(entry)
        task = asyncio.create_task(use(models, "a", 5))
        for _ in range(2):  # while it loads, and while it works
            await asyncio.sleep(0.7)
            with pytest.raises(ModelBusy):
                await models.pool.unload(entry)
        await task
        await models.pool.unload(entry)
        assert models.log.unloads == [("a", "request")]
        await models.pool.close()

    run_virtually(main())


def test_a_second_unload_waits_for_the_first() -> None:
    async def main() -> None:
        models = simulated([lazy("a"), lazy("b")], None)
        entry = models.entry("a")
        await use(models, "a", 0)
        first = asyncio.create_task(models.pool.unload(entry))
        await asyncio.sleep(0.01)
        assert entry.state == "unloading"
        await models.pool.unload(entry)
        assert (entry.state, models.loaders["a"].running) == ("unloaded", False)
        await first
        assert models.log.unloads == [("a", "request")]
        await use(models, "a", 0)
        await models.pool.unload(entry)
        assert entry.state == "unloaded"
        await models.pool.close()

    run_virtually(main())


def test_names_aliases_and_unknown_names() -> None:
    async def main() -> None:
        models = simulated([lazy("org/a", aliases=("gpt-4o", "b")), lazy("c")], None)
        for name in ("org/a", "gpt-4o", "b", "b:latest", "org/a:latest", None):
            assert models.pool.find(name).name == "org/a"
            assert name is None or models.pool.has_model(name)
        for name in ("d", "", "c:latest:latest", "org/a:x", "x" * 10_000):
            with pytest.raises(UnknownModel, match="this server has 'org/a', 'c'") as unknown:
                models.pool.find(name)
            assert len(str(unknown.value)) < 300
            assert not models.pool.has_model(name)
        await models.pool.close()

    run_virtually(main())


def test_unknown_names_get_the_names_of_adapters_too() -> None:
    async def main() -> None:
        plans = [lazy("a", adapters=("sql", "poems")), lazy("b", adapters=("poems",)), lazy("c")]
        models = simulated(plans, None)
        with pytest.raises(UnknownModel, match=r"this server has 'a', 'b', 'c', 'sql', 'poems'$"):
            models.pool.find("sqli")
        await models.pool.close()

    run_virtually(main())


def test_requests_that_wait_when_the_server_stops_end() -> None:
    async def main() -> None:
        models = simulated([lazy("a")], None, lambda name: SimulatedLoader(name, 100.0))
        waiting = asyncio.create_task(use(models, "a", 1))
        await asyncio.sleep(1)
        await models.pool.close()
        with pytest.raises(NotReady):
            await waiting
        assert not models.loaders["a"].running

    run_virtually(main())


def test_loads_at_the_same_time_are_few() -> None:
    async def main() -> None:
        models = simulated([lazy(name) for name in "abcdef"], None)
        uses = asyncio.gather(*(use(models, name, 0) for name in "abcdef"))
        await asyncio.sleep(0.5)
        assert list(models.states().values()).count("loading") == MAX_LOADS
        assert max(await uses) == 6 / MAX_LOADS
        await models.pool.close()

    run_virtually(main())
