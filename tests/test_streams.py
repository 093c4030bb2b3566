"""One request's stream in the API process: what a late reader gets, and how it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fake_engine import model_info

from chairlift.engine.client.base import StreamingClient
from chairlift.engine.client.stream import Stream
from chairlift.engine.errors import EngineDead
from chairlift.engine.messages import (
    SamplingParams,
    StepOutput,
    StepStats,
    Submit,
    ToEngine,
    TokenOutput,
)


class Scripted(StreamingClient):
    """Its engine is the test."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[ToEngine] = []
        self.begin(lambda text: None)
        self.receive(model_info())

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def step(self, *outputs: TokenOutput) -> None:
        self.receive(StepOutput(list(outputs), StepStats()))


@pytest.fixture
async def client() -> Scripted:
    return Scripted()


def submitted(client: Scripted, name: str, n: int = 1) -> Stream:
    return client.submit(Submit(name, [1], SamplingParams(max_tokens=4, seed=0), n))


async def tokens(arrivals: AsyncIterator[list[TokenOutput]]) -> list[list[int]]:
    return [
        [token for output in arrived for token in output.token_ids] async for arrived in arrivals
    ]


async def test_a_late_reader_gets_all_steps_at_once_and_in_order(client: Scripted) -> None:
    stream = submitted(client, "late")
    arrivals = aiter(stream)
    client.step(TokenOutput("late", 0, [5]))
    assert [output.token_ids for output in await anext(arrivals)] == [[5]]
    client.step(TokenOutput("late", 0, [6]), TokenOutput("other", 0, [9]))
    client.step(TokenOutput("late", 0, [7]))
    client.step(TokenOutput("late", 0, [8], finish="length"))
    assert await tokens(arrivals) == [[6, 7, 8]]


async def test_outputs_of_a_choice_that_has_ended_are_dropped(client: Scripted) -> None:
    stream = submitted(client, "two", n=2)
    client.step(TokenOutput("two", 0, [5]), TokenOutput("two", 1, [6]))
    stream.stop(0)
    client.step(TokenOutput("two", 0, [7]), TokenOutput("two", 1, [8], finish="length"))
    assert await tokens(aiter(stream)) == [[5, 6, 8]]


async def test_what_arrived_before_the_engine_died_comes_first(client: Scripted) -> None:
    ended, running, waiting = (submitted(client, name) for name in ("ended", "running", "waiting"))
    client.step(TokenOutput("ended", 0, [5], finish="stop"), TokenOutput("running", 0, [6]))
    client.end("it was killed")
    assert await tokens(aiter(ended)) == [[5]]
    arrivals = aiter(running)
    assert [output.token_ids for output in await anext(arrivals)] == [[6]]
    for stream in (arrivals, aiter(waiting)):
        with pytest.raises(EngineDead, match="killed"):
            await anext(stream)
