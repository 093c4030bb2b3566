"""The pool under generated traffic, on simulated memory and time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api.simulated_models import SimulatedLoader, lazy, simulated, use
from support.virtual_time import run_virtually

from chairlift.api.errors import NotReady

NAMES = "abcd"
_Uses = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.floats(0, 20),  # arrival
        st.floats(0, 8),  # duration
        st.none() | st.floats(0.1, 40),  # time limit
        st.none() | st.floats(0, 20),  # when its client leaves
    ),
    max_size=25,
)
_Models = st.tuples(
    *[
        st.tuples(
            st.integers(1, 4), st.none() | st.floats(0.5, 8), st.floats(0.1, 4), st.integers(0, 1)
        )
    ]
    * len(NAMES)
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(models=_Models, budget=st.integers(4, 10), uses=_Uses)
def test_any_traffic_keeps_the_budget_and_leaves_nobody_waiting(
    models: Any, budget: int, uses: Any
) -> None:
    """Every request is served, refused with a reason, or gone; engines come and go one at a time.

    ``Log.memory_changed`` checks the pool's own invariants after each of its decisions, the loader
    that no model with work is unloaded and none has two engines.
    """
    shapes = dict(zip(NAMES, models, strict=True))

    async def main() -> None:
        plans = [lazy(name, memory, keep_alive=idle) for name, (memory, idle, *_) in shapes.items()]
        pool = simulated(
            plans, budget, lambda name: SimulatedLoader(name, shapes[name][2], shapes[name][3])
        )

        async def request(
            name: str, arrival: float, seconds: float, limit: float | None, leaves: float | None
        ) -> str:
            await asyncio.sleep(arrival)
            try:
                async with asyncio.timeout(leaves):
                    waited = await use(pool, name, seconds, limit)
            except NotReady:
                return "refused"
            except TimeoutError:
                return "left"
            assert limit is None or waited <= limit + 1e-6
            return "served"

        tasks = [asyncio.create_task(request(*one)) for one in uses]
        async with asyncio.timeout(300):
            outcomes = await asyncio.gather(*tasks)
        for (_, _, _, limit, _), outcome in zip(uses, outcomes, strict=True):
            # Without a limit, only a load that fails may refuse a request.
            assert outcome != "refused" or limit is not None or pool.log.failed
        assert pool.log.most <= budget
        assert all(not entry.waiters and not entry.leases for entry in pool.pool.entries)
        began = sum(loader.began for loader in pool.loaders.values())
        assert began == len(pool.log.loaded) + len(pool.log.failed) + sum(
            entry.state == "loading" for entry in pool.pool.entries
        )
        assert began <= len(uses), "one load serves at least one request"
        await asyncio.sleep(15)  # a load that nobody waits for any more, and a keep-alive
        for entry in pool.pool.entries:
            assert entry.state in ("unloaded", "failed") or entry.plan.keep_alive is None
        await pool.pool.close()
        assert not any(loader.running for loader in pool.loaders.values())

    run_virtually(main())
