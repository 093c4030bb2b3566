"""The choice of a replica: prefixes against load, with generated requests and speeds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.client import prefix_index
from chairlift.engine.client.prefix_index import BLOCK, PrefixIndex, block_hashes
from chairlift.engine.client.routing import ReplicaLoad, Router
from chairlift.engine.client.step_speed import UNMEASURED, StepSpeed
from chairlift.engine.messages import SamplingParams, Submit

ROWS = 8


def request(prompt: list[int], salt: str = "", max_tokens: int = 50, **fields: object) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Submit("name", prompt, params, cache_salt=salt, **fields)  # type: ignore[arg-type]


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def idle(*replicas: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(replica, 0, 0, 0, ROWS) for replica in replicas]


def measured(router: Router, base: float, row: float, prompt: float) -> None:
    random_ = random.Random(1)
    for _ in range(50):
        rows, chunk = random_.randrange(1, ROWS), random_.choice((0, 0, 100, 400))
        router.speed.learn(chunk, rows, rows, base + row * rows + prompt * chunk)


# ---- the speed of steps


@settings(max_examples=40)
@given(
    st.floats(0, 0.1),
    st.floats(0, 0.01),
    st.floats(0, 0.001),
    st.integers(0, 10_000),
)
def test_the_costs_of_a_step_are_recovered(
    base: float, row: float, prompt: float, seed: int
) -> None:
    speed, random_ = StepSpeed(), random.Random(seed)
    for _ in range(60):
        rows, chunk = random_.randrange(1, 40), random_.choice((0, 0, 64, 512))
        speed.learn(chunk, rows, rows, base + row * rows + prompt * chunk)
    costs = speed.fit()
    # The prior takes a few hundredths of the row's cost.
    assert costs.row == pytest.approx(row, abs=0.1 * abs(row - prompt) + 1e-6)
    assert costs.prompt == pytest.approx(prompt, abs=0.01 * abs(row - prompt) + 1e-6)
    assert costs.step(20) == pytest.approx(base + row * 20, abs=2 * abs(row - prompt) + 1e-6)


def test_noise_of_a_few_rows_does_not_count_as_their_cost() -> None:
    speed, random_ = StepSpeed(), random.Random(0)
    for _ in range(500):
        rows = random_.choice((1, 2))
        speed.learn(random_.choice((0, 400)), rows, rows, 0.02 * rows)
    assert speed.fit().row < 0.002


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 512), st.integers(0, 64), st.floats(0, 10)), max_size=60))
def test_no_cost_is_below_zero_whatever_was_measured(steps: list[tuple[int, int, float]]) -> None:
    speed = StepSpeed()
    for prompt, rows, seconds in steps:
        speed.learn(prompt, rows, rows, seconds)
    costs = speed.fit()
    assert min(costs.base, costs.row, costs.prompt) >= 0
    if not steps:
        assert costs == UNMEASURED


def test_recent_steps_outweigh_older_ones() -> None:
    speed = StepSpeed()
    for seconds in (0.5, 0.1):
        for _ in range(2000):
            speed.learn(0, 4, 4, seconds)
    assert speed.fit().step(4) == pytest.approx(0.1, rel=0.01)


def test_the_tokens_of_a_row_in_a_step_are_learned() -> None:
    speed = StepSpeed()
    assert speed.fit().gain == 1
    for _ in range(50):
        speed.learn(100, 0, 0, 0.1)
        speed.learn(0, 4, 12, 0.1)
    assert speed.fit().gain == pytest.approx(3)


def test_rows_that_gain_several_tokens_are_in_the_way_for_fewer_steps() -> None:
    """A prefix is worth going to busier rows for if these will soon be done."""

    def chosen(tokens_of_a_row: int) -> int:
        router = Router(2)
        for rows in (1, 8) * 50:
            router.speed.learn(0, rows, tokens_of_a_row * rows, 0.01 * rows)
            router.speed.learn(50, 0, 0, 0.04)
        prompt = tokens(0, 5 * BLOCK)
        router.route(request(prompt), 30, idle(0))
        loads = [ReplicaLoad(0, 0, 30, 1, ROWS), ReplicaLoad(1, 0, 0, 0, ROWS)]
        return router.route(request(prompt), 30, loads).replica

    assert (chosen(1), chosen(8)) == (1, 0)


# ---- the index of prefixes


@given(st.integers(0, 5 * BLOCK), st.integers(0, 5 * BLOCK), st.integers(0, 5 * BLOCK))
def test_the_longest_shared_prefix_is_found_in_whole_blocks(
    shared: int, one: int, other: int
) -> None:
    index, head = PrefixIndex(), tokens(0, shared)
    first, second = [*head, 1001, *tokens(1, one)], [*head, 1002, *tokens(2, other)]
    index.add(block_hashes(request(first)))
    assert index.match(block_hashes(request(second))) == shared // BLOCK * BLOCK
    assert index.match(block_hashes(request(first))) == (len(first) - 1) // BLOCK * BLOCK
    # The last token is always computed.
    assert index.match(block_hashes(request(first))) < len(first)


def test_tenants_share_no_prefix() -> None:
    index, prompt = PrefixIndex(), tokens(0, 300)
    index.add(block_hashes(request(prompt, "one")))
    assert index.match(block_hashes(request(prompt, "one"))) == 256
    for salt in ("", "two", "\ud800"):
        assert index.match(block_hashes(request(prompt, salt))) == 0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 900)), max_size=40))
def test_an_index_never_exceeds_its_capacity(capacity: int, prompts: list[tuple[int, int]]) -> None:
    index = PrefixIndex()
    index.resize(capacity)
    for seed, length in prompts:
        hashes = block_hashes(request(tokens(seed, length)))
        index.add(hashes)
        assert len(index) <= capacity
        # What was used last is kept from its beginning, because a tail alone is of no use.
        assert index.match(hashes) == min(len(hashes), capacity) * BLOCK
    index.clear()
    assert len(index) == 0


def test_a_prompt_longer_than_an_index_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_BLOCKS", 5)
    assert len(block_hashes(request([7] * (BLOCK * 20)))) == 5


# ---- the choice


def test_a_request_goes_to_its_prefix_unless_that_is_busier_by_the_cost_of_computing_it() -> None:
    router, prompt = Router(2), tokens(0, 1000)
    measured(router, base=0.01, row=0.0, prompt=0.001)
    assert router.route(request(prompt), 50, idle(1)) == (1, 0)
    hit = 15 * BLOCK
    # Computing it takes its time twice: now, and later for what it displaces.
    for waiting, replica in ((2 * hit - 1, 1), (2 * hit + 1, 0)):
        other = Router(2)
        measured(other, base=0.01, row=0.0, prompt=0.001)
        other.route(request(prompt), 50, idle(1))
        loads = [ReplicaLoad(0, 0, 0, 0, ROWS), ReplicaLoad(1, waiting, 0, 0, ROWS)]
        assert other.route(request(prompt), 50, loads).replica == replica


def test_the_margin_follows_the_measured_speed() -> None:
    """Rows that slow each other down justify to leave a prefix; rows that do not, do not."""
    for row, replica in ((0.0001, 1), (0.05, 0)):
        router, prompt = Router(2), tokens(0, 1000)
        measured(router, base=0.02, row=row, prompt=0.001)
        router.route(request(prompt), 100, idle(1))
        loads = [ReplicaLoad(0, 0, 0, 0, ROWS), ReplicaLoad(1, 0, 100 * ROWS, ROWS - 1, ROWS)]
        assert router.route(request(prompt), 100, loads).replica == replica


def test_a_full_batch_counts_as_a_wait() -> None:
    router, prompt = Router(2), tokens(0, 1000)
    measured(router, base=0.02, row=0.0, prompt=0.0001)
    router.route(request(prompt), 100, idle(1))
    loads = [ReplicaLoad(0, 0, 0, 0, ROWS), ReplicaLoad(1, 0, 0, 2 * ROWS, ROWS)]
    assert router.route(request(prompt), 100, loads).replica == 0


@pytest.mark.parametrize("fields", [{"pooling": "mean"}, {"prompt_logprobs": 0}, {"replay": True}])
def test_requests_without_use_for_a_prefix_are_balanced(fields: dict[str, object]) -> None:
    router, prompt = Router(3), tokens(0, 500)
    routes = [router.route(request(prompt, **fields), 0, idle(0, 1, 2)) for _ in range(9)]
    assert sorted(route.replica for route in routes) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert {route.hit for route in routes} == {0}


def test_a_chat_goes_on_where_its_reply_was_computed() -> None:
    router, prompt, reply = Router(2), tokens(0, 10), tokens(1, 300)
    assert router.route(request(prompt), 10, idle(1)) == (1, 0)
    router.extend(1, request(prompt), reply)
    assert router.route(request([*prompt, *reply, 5]), 10, idle(0, 1)) == (1, 256)
    router.extend(0, request(tokens(2, 10), pooling="mean"), reply)
    assert router.route(request([*tokens(2, 10), *reply]), 10, idle(0, 1)).hit == 0


def test_a_lost_replica_has_no_prefixes() -> None:
    router, prompt = Router(2), tokens(0, 500)
    router.route(request(prompt), 10, idle(1))
    assert router.route(request(prompt), 10, idle(0, 1)).hit > 0
    router.forget(1)
    assert router.route(request(prompt), 10, idle(0, 1)) == (0, 0)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 5),
    st.floats(0.001, 0.05),
    st.floats(0, 0.005),
    st.floats(1e-5, 0.002),
    st.booleans(),
    st.integers(0, 1000),
)
def test_requests_without_shared_prefixes_are_balanced(
    replicas: int, base: float, row: float, prompt: float, known: bool, seed: int
) -> None:
    """However fast steps are, none starves: no replica has twice the mean and one request more."""
    router, random_ = Router(replicas), random.Random(seed)
    if known:
        measured(router, base, row, prompt)
    queued, choices = [0] * replicas, [0] * replicas
    longest = 400
    for number in range(replicas * 12):
        length = random_.randrange(1, longest)
        loads = [
            ReplicaLoad(i, queued[i], 20 * choices[i], choices[i], 64) for i in range(replicas)
        ]
        chosen = router.route(request(tokens(number, length)), 20, loads).replica
        queued[chosen] += length
        choices[chosen] += 1
    assert max(choices) <= 2 * 12 + 1
    assert max(queued) <= 2 * sum(queued) / replicas + longest
    assert min(choices) > 0


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(0, 1000))
def test_the_same_history_gives_the_same_routes(replicas: int, seed: int) -> None:
    def routes() -> list[tuple[int, int]]:
        router, random_ = Router(replicas), random.Random(seed)
        found = []
        for _ in range(40):
            prompt = [*tokens(random_.randrange(4), 300), *tokens(random_.randrange(99), 40)]
            loads = [
                ReplicaLoad(
                    i, random_.randrange(900), random_.randrange(300), random_.randrange(9), 8
                )
                for i in range(replicas)
            ]
            found.append(tuple(router.route(request(prompt), 30, loads)))
            rows = 1 + random_.randrange(8)
            router.speed.learn(random_.randrange(300), rows, rows, random_.random())
        return found

    assert routes() == routes()


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(1, 12), st.integers(0, 1000))
def test_each_prefix_is_computed_at_most_once_a_replica(
    replicas: int, prefixes: int, seed: int
) -> None:
    """However the loads are, a miss puts the prefix where it was missed."""
    router, random_ = Router(replicas), random.Random(seed)
    measured(router, 0.01, 0.001, 0.0005)
    heads = [tokens(number, 4 * BLOCK) for number in range(prefixes)]
    missed: list[tuple[int, int]] = []
    for number in range(60):
        which = random_.randrange(prefixes)
        loads = [
            ReplicaLoad(i, random_.randrange(2000), random_.randrange(300), random_.randrange(9), 8)
            for i in range(replicas)
        ]
        chosen, hit = router.route(request([*heads[which], *tokens(100 + number, 30)]), 30, loads)
        if hit < 4 * BLOCK:
            missed.append((which, chosen))
    assert len(missed) == len(set(missed))
