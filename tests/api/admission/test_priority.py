"""Priorities over HTTP: the field, the header, and the wait that a full queue announces."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api.api_server import CHAT, Running, ending, running
from support.api.fake_engine import FakeEngine, model_info

from chairlift.cache.capacity import KVGeometry
from chairlift.engine.client.base import MAX_RETRY_AFTER, BaseEngineClient
from chairlift.engine.errors import PromptTooLong
from chairlift.engine.messages import (
    SamplingParams,
    StepOutput,
    StepStats,
    Submit,
    ToEngine,
    TokenOutput,
)
from chairlift.scheduler.limits import Limits

BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x"},
    "/v1/embeddings": {"input": "x"},
}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(model_info(), ending("Hi"))) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "header", "priority"),
    [
        ({}, {}, 0),
        ({"priority": None}, {}, 0),
        ({"priority": 7}, {}, 7),
        ({"priority": -100}, {}, -100),
        ({}, {"X-Priority": "-5"}, -5),
        ({}, {"x-priority": "100"}, 100),
        ({"priority": 0}, {"X-Priority": "3"}, 0),
        ({"priority": 2}, {"X-Priority": "urgent"}, 2),
    ],
)
async def test_the_priority_reaches_the_engine_and_the_body_overrides_the_header(
    server: Running,
    path: str,
    field: dict[str, int | None],
    header: dict[str, str],
    priority: int,
) -> None:
    status, _ = await server.post(path, {**BODIES[path], **field}, **header)
    assert status == 200
    assert [submit.priority for submit in server.engine.submitted] == [priority]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("given", ["", "high", "1.5", "101", "-101", "9" * 400, "0x1", "\u0661"])
async def test_a_bad_header_is_named(server: Running, path: str, given: str) -> None:
    status, body = await server.post(path, BODIES[path], **{"X-Priority": given})
    assert (status, body["error"]["param"]) == (400, "X-Priority")
    assert "-100 to 100" in body["error"]["message"]
    assert not server.engine.submitted


async def test_the_header_is_documented(server: Running) -> None:
    _, document = await server.get("/openapi.json")
    for path in BODIES:
        (parameter,) = document["paths"][path]["post"]["parameters"]
        assert (parameter["name"], parameter["in"]) == ("X-Priority", "header")
        assert (parameter["schema"]["minimum"], parameter["schema"]["maximum"]) == (-100, 100)
    assert "parameters" not in document["paths"]["/tokenize"]["post"]


class ManualClient(BaseEngineClient):
    """The real client of an engine that the test plays."""

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self.sent: list[ToEngine] = []
        self.begin(print)
        self.receive(model_info(max_rows=2, max_queue=4, **facts))

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def queue(self, name: str, priority: int, prompt: int, output: int, ago: float = 0.0) -> None:
        params = SamplingParams(max_tokens=output, seed=0)
        arrival = time.monotonic() - ago
        self.submit(Submit(name, [5] * prompt, params, arrival=arrival, priority=priority))

    def report_costs(self, prompt_seconds: float, row_seconds: float) -> None:
        """Reports steps in which a prompt token and a row's token took these times."""
        for tokens in (0, 50):
            seconds = tokens * prompt_seconds + 4 * row_seconds
            stats = StepStats(
                ended_prefill_tokens=tokens, ended_rows=4, ended_tokens=4, ended_seconds=seconds
            )
            self.receive(StepOutput([], stats))


async def _refused(server: Running, path: str, **headers: str) -> tuple[int, str]:
    """The Retry-After of a 429, and its message."""
    body = {**BODIES[path], "max_tokens": 1}
    async with server.http.post(server.url + path, json=body, headers=headers) as response:
        assert response.status == 429
        error = (await response.json())["error"]
        assert error["code"] == "queue_full"
        return int(response.headers["Retry-After"]), error["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_full_queue_announces_a_wait_for_each_priority(path: str) -> None:
    engine = ManualClient()
    engine.report_costs(0.01, 0.5)
    # Two run; one of the others is urgent, and one of low priority has waited for 35 s.
    engine.queue("runs", 0, 100, 20)
    engine.queue("runs too", 5, 100, 10)
    engine.queue("urgent", -1, 100, 40)
    engine.queue("normal", 0, 100, 60)
    engine.queue("old", 3, 100, 100, ago=35.0)
    engine.queue("low", 3, 100, 80)
    first = [TokenOutput(name, 0, [7]) for name in ("runs", "runs too")]
    engine.receive(StepOutput(first, StepStats()))
    async with running(engine) as server:  # type: ignore[arg-type]
        running_seconds = (19 + 9) * 0.5
        waits = {"-2": 0, "-1": 21, "0": 21 + 31 + 51, "2": 21 + 31 + 51, "3": 21 + 31 + 51 + 41}
        for priority, seconds in waits.items():
            wait, message = await _refused(server, path, **{"X-Priority": priority})
            assert wait == running_seconds + seconds
            assert f"one of priority {priority} would wait for about {wait} s" in message
            assert "6 requests are unfinished and 6 is the limit" in message
        wait, _ = await _refused(server, path)
        assert wait == running_seconds + waits["0"]


async def test_the_announced_wait_is_bounded_and_shrinks_as_work_is_done() -> None:
    engine = ManualClient()
    for number in range(6):
        engine.queue(str(number), 0, 10, 500)
    async with running(engine) as server:  # type: ignore[arg-type]
        assert (await _refused(server, "/v1/completions"))[0] == 1, "nothing is known"
        engine.report_costs(0.0, 10.0)
        assert (await _refused(server, "/v1/completions"))[0] == MAX_RETRY_AFTER
        done = [TokenOutput(str(number), 0, [7] * 491) for number in range(6)]
        engine.receive(StepOutput(done, StepStats()))
        wait, _ = await _refused(server, "/v1/completions")
        assert wait == 6 * 9 * 10
        # One of them ends early, which makes room.
        engine.receive(StepOutput([TokenOutput("0", 0, [7], finish="stop")], StepStats()))
        engine.queue("next", 0, 10, 1)
        assert (await _refused(server, "/v1/completions"))[0] == 5 * 9 * 10 + 10


async def test_the_client_refuses_a_request_that_never_fits_in_memory() -> None:
    limits = Limits(8, 64, 100_000, KVGeometry(100, {32: 50}))
    longest = limits.max_context
    engine = ManualClient(max_context=longest, limits=limits)
    engine.queue("fits", 0, longest - 5, 5)
    with pytest.raises(PromptTooLong) as refusal:
        engine.queue("does not", 0, longest - 5, 6)
    assert limits.shortage(longest + 1) in str(refusal.value)
    assert len(engine.sent) == 1
