"""Shared prefixes are computed once, for all kinds of layers, and change no token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.engine.bench import Bench
from support.engine.pages import HostPages
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.engine.core.pipeline import LaunchOrder
from chairlift.engine.messages import Abort
from chairlift.engine.model import attention
from chairlift.scheduler.siblings import MIN_SHARED

PREFIX_BYTES = 1 << 26


def _tokens(seed: int, count: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(3, 250) for _ in range(count)]


KINDS: list[TinyKind] = ["llama", "gemma3", "lfm2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prefix_is_computed_once(kind: TinyKind) -> None:
    model = tiny_model(kind, seed=5)
    bench = Bench(model, prefix=PREFIX_BYTES)
    shared = _tokens(1, 170)
    prompts = [[*shared, *_tokens(10 + i, 9)] for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(str(i), prompt, 6)
    bench.drain()
    assert [bench.tokens(str(i)) for i in range(6)] == [solo_tokens(model, p, 6) for p in prompts]
    cached = [bench.outputs[str(i), 0][0].cached_tokens for i in range(6)]
    # Recurrent states are cached at multiples of 64, and, once two prompts have shared it, at the
    # point where they part; keys and values for every token.
    assert cached[0] == 0
    # A prompt does not wait for another to cache its last few tokens.
    assert cached[1] >= (128 if kind == "lfm2" else 171 - MIN_SHARED), cached
    assert all(171 - MIN_SHARED <= c <= 178 for c in cached[2:]), cached
    computed = sum(stats.prefill_tokens for stats in bench.stats)
    assert computed + sum(cached) == sum(map(len, prompts))
    assert sum(stats.prefix_hits for stats in bench.stats) == sum(cached)
    assert sum(stats.prefix_queries for stats in bench.stats) == sum(map(len, prompts))
    assert bench.stats[-1].prefix_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", LaunchOrder)
def test_the_next_turn_of_a_chat_reuses_the_reply(kind: TinyKind, order: LaunchOrder) -> None:
    """In each order of launching, also if the engine idles between turns."""
    model = tiny_model(kind, seed=5)
    kernels = HostPages() if order is LaunchOrder.QUEUED else None
    if kernels is not None:
        attention.install(model)
    eager = order is LaunchOrder.EAGER
    bench = Bench(model, prefix=PREFIX_BYTES, eager=eager, kernels=kernels)
    assert bench.core.pipeline.order is order
    history = _tokens(2, 40)
    before = 0
    for turn, count in enumerate((12, 1, 2, 12)):
        name = str(turn)
        bench.submit(name, history, count)
        bench.drain()
        assert not bench.stats[-1].kv_used_bytes, "an idle engine keeps no rows"
        reply = bench.tokens(name)
        assert reply == solo_tokens(model, history, count, reply)
        # All tokens of the last turn except the last, which was never fed.
        assert bench.outputs[name, 0][0].cached_tokens == before
        before = len(history) + len(reply) - 1
        history = [*history, *reply, *_tokens(20 + turn, 7)]


def test_choices_share_a_prompt_and_tenants_share_nothing() -> None:
    model = tiny_model("llama", seed=5)
    bench = Bench(model, prefix=PREFIX_BYTES)
    prompt = _tokens(3, 60)
    bench.submit("a", prompt, 4, n=3, salt="tenant")
    bench.drain()
    bench.submit("b", prompt, 4, salt="other")
    bench.drain()
    bench.submit("c", prompt, 4, n=2, salt="tenant")
    bench.drain()
    assert {bench.outputs["a", i][0].cached_tokens for i in range(3)} == {0}
    assert bench.outputs["b", 0][0].cached_tokens == 0
    assert {bench.outputs["c", i][0].cached_tokens for i in range(2)} == {59}
    assert {c.cached_tokens for c in bench.finished} == {0, 59}
    assert bench.tokens("c", 1) == bench.tokens("a") == solo_tokens(model, prompt, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eager", [False, True])
def test_random_traffic_with_shared_prefixes_gives_the_solo_tokens(
    kind: TinyKind, eager: bool
) -> None:
    """With joins, leaves, aborts, preemptions and evictions, for every kind of layer."""
    model = tiny_model(kind, seed=7)
    random_ = random.Random(7)
    bench = Bench(model, prefix=200_000, eager=eager)
    trunks = [_tokens(i, random_.choice([5, 33, 90])) for i in range(4)]
    requests: dict[str, tuple[list[int], int]] = {}
    for i in range(40):
        trunk = random_.choice(trunks)
        prompt = [*trunk[: random_.randrange(1, len(trunk) + 1)], *_tokens(100 + i, i % 5)]
        count = random_.randrange(1, 14)
        requests[str(i)] = prompt, count
        bench.submit(str(i), prompt, count)
        if i % 6 == 5:
            bench.submit(f"leaves {i}", prompt, 30)
            bench.step()
            bench.core.abort(Abort(f"leaves {i}"))
        for _ in range(random_.randrange(3)):
            bench.step()
    bench.drain()
    for name, (prompt, count) in requests.items():
        assert bench.tokens(name) == solo_tokens(model, prompt, count, bench.tokens(name)), name
    assert sum(stats.prefix_hits for stats in bench.stats) > 200
    assert sum(stats.prefix_evictions for stats in bench.stats) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [PREFIX_BYTES, 150_000])
def test_stored_prefixes_outlive_the_engine(kind: TinyKind, budget: int, tmp_path: Path) -> None:
    """Evicted ones, and those in memory when the engine was closed."""
    model = tiny_model(kind, seed=5)
    prompts = [_tokens(30 + i, 70) for i in range(6)]
    expected = [solo_tokens(model, prompt, 5) for prompt in prompts]
    bench = Bench(model, prefix=budget, directory=tmp_path)
    for i, prompt in enumerate(prompts):
        bench.submit(str(i), prompt, 5)
        bench.drain()
    evicted = sum(stats.prefix_evictions for stats in bench.stats)
    assert (evicted > 0) == (budget < PREFIX_BYTES)
    bench.core.close(10)
    after = Bench(model, prefix=budget, directory=tmp_path)
    for i, prompt in enumerate(prompts):
        after.submit(str(i), prompt, 5)
        after.drain()
        assert after.tokens(str(i)) == expected[i]
        assert after.outputs[str(i), 0][0].cached_tokens >= 64
    after.core.close(10)
