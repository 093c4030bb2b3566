"""Routing under simulated traffic: hits, balance and duration, against one engine.

The simulated engines batch continuously: each step gives every row a token and computes a chunk of
prompts, and takes the time of a linear model, from which the router learns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from chairlift.engine.client.routing import ReplicaLoad, Router
from chairlift.engine.client.step_speed import StepCosts
from chairlift.engine.messages import SamplingParams, Submit

CHUNK = 512
# The costs of a step: a model on two CPU cores, the same with dear rows, an 8B model on a GPU.
CPU, DEAR_ROWS, GPU = (
    StepCosts(0.02, 0.001, 0.0008),
    StepCosts(0.02, 0.003, 0.0004),
    StepCosts(0.0054, 0.00004, 0.00003),
)


class Traffic(NamedTuple):
    """Requests with few prefixes, the popular ones ``skew`` times as often as the next; lengths in
    tokens."""

    requests: int
    prefixes: int
    prefix: int
    suffix: int
    output: int
    concurrency: int
    skew: float = 1.0

    def prompts(self) -> list[list[int]]:
        random_ = random.Random(3)
        heads = [random_.choices(range(50_000), k=self.prefix) for _ in range(self.prefixes)]
        weights = [self.skew**-number for number in range(self.prefixes)]
        chosen = random_.choices(heads, weights, k=self.requests)
        return [[*head, *random_.choices(range(50_000), k=self.suffix)] for head in chosen]


class Row:
    def __init__(self, prompt: int, output: int) -> None:
        self.prompt, self.output = prompt, output


@dataclass
class Engine:
    costs: StepCosts
    max_rows: int
    clock: float = 0.0
    waiting: list[Row] = field(default_factory=list)

    def step(self) -> tuple[int, int, int, float]:
        """Computes a step; returns its prompt tokens, rows, output tokens and seconds."""
        prompt = rows = 0
        for row in self.waiting[: self.max_rows]:
            if row.prompt:
                chunk = min(row.prompt, CHUNK - prompt)
                row.prompt -= chunk
                prompt += chunk
            else:
                row.output -= 1
                rows += 1
        self.waiting = [row for row in self.waiting if row.prompt or row.output]
        seconds = self.costs.step(rows) + self.costs.prompt * prompt
        self.clock += seconds
        return prompt, rows, rows, seconds


class Result(NamedTuple):
    """Hits in tokens, requests by replica, and seconds until the last request has ended."""

    hits: int
    sent: list[int]
    seconds: float


def served(traffic: Traffic, costs: StepCosts, replicas: int, max_rows: int = 32) -> Result:
    router, engines = Router(replicas), [Engine(costs, max_rows) for _ in range(replicas)]
    pending, hits, sent = traffic.prompts(), 0, [0] * replicas
    while pending or any(engine.waiting for engine in engines):
        while pending and sum(len(engine.waiting) for engine in engines) < traffic.concurrency:
            params = SamplingParams(max_tokens=traffic.output, seed=0)
            request = Submit("name", pending.pop(), params)
            loads = [
                ReplicaLoad(
                    *(number, sum(row.prompt for row in engine.waiting)),
                    *(sum(row.output for row in engine.waiting), len(engine.waiting), max_rows),
                )
                for number, engine in enumerate(engines)
            ]
            chosen, hit = router.route(request, traffic.output, loads)
            hits += hit
            sent[chosen] += 1
            engines[chosen].waiting.append(Row(len(request.prompt) - hit, traffic.output))
        busy = [engine for engine in engines if engine.waiting]
        behind = min(busy, key=lambda engine: engine.clock)
        router.speed.learn(*behind.step())
        for engine in engines:
            if not engine.waiting:
                engine.clock = max(engine.clock, behind.clock)
    return Result(hits, sent, max(engine.clock for engine in engines))


@pytest.mark.parametrize("costs", [CPU, DEAR_ROWS, GPU])
@pytest.mark.parametrize(
    "traffic",
    [
        Traffic(150, 10, 256, 256, 64, concurrency=8),
        Traffic(150, 10, 256, 256, 64, concurrency=150),
        Traffic(100, 5, 1024, 64, 32, concurrency=32),
        Traffic(100, 10, 256, 32, 32, concurrency=1),
    ],
)
def test_replicas_hit_nearly_as_often_as_one_engine_and_share_the_work(
    traffic: Traffic, costs: StepCosts
) -> None:
    one, two = served(traffic, costs, 1), served(traffic, costs, 2)
    assert two.hits >= 0.9 * one.hits
    assert min(two.sent) >= 0.3 * traffic.requests
    assert two.seconds <= one.seconds * 1.01


@pytest.mark.parametrize("costs", [CPU, DEAR_ROWS, GPU])
@pytest.mark.parametrize("prefixes", [1, 6])
def test_a_popular_prefix_does_not_keep_the_others_idle(costs: StepCosts, prefixes: int) -> None:
    """A system prompt that nearly all requests share is computed once in each replica."""
    traffic = Traffic(150, prefixes, 512, 64, 64, concurrency=150, skew=4.0)
    one, four = served(traffic, costs, 1), served(traffic, costs, 4)
    assert min(four.sent) >= 0.5 * traffic.requests / 4
    assert four.seconds < 0.5 * one.seconds
    assert four.hits >= 0.85 * one.hits


@pytest.mark.parametrize("costs", [CPU, GPU])
def test_without_shared_prefixes_replicas_halve_the_time(costs: StepCosts) -> None:
    traffic = Traffic(120, 1, 0, 300, 64, concurrency=120)
    one, two = served(traffic, costs, 1), served(traffic, costs, 2)
    assert two.seconds < 0.6 * one.seconds
    assert max(two.sent) <= 0.55 * traffic.requests
