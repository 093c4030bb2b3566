"""A request's stream in the API process: slow readers, stopped choices, a dead engine."""

from __future__ import annotations

import pytest
from support.engine.client.streams import Scripted, submitted, tokens

from chairlift.engine.errors import EngineDead
from chairlift.engine.messages import TokenOutput


@pytest.fixture
async def client() -> Scripted:
    return Scripted()


async def test_a_slow_reader_gets_all_steps_at_once_and_in_order(client: Scripted) -> None:
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


async def test_outputs_from_before_the_engine_died_come_before_the_error(client: Scripted) -> None:
    ended, running, waiting = (submitted(client, name) for name in ("ended", "running", "waiting"))
    client.step(TokenOutput("ended", 0, [5], finish="stop"), TokenOutput("running", 0, [6]))
    client.end("it was killed")
    assert await tokens(aiter(ended)) == [[5]]
    arrivals = aiter(running)
    assert [output.token_ids for output in await anext(arrivals)] == [[6]]
    for stream in (arrivals, aiter(waiting)):
        with pytest.raises(EngineDead, match="killed"):
            await anext(stream)
