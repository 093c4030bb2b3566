"""The load test's arithmetic, on numbers computed by hand."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.load import run_load
from chairlift.loadtest.bench.metrics import Reply, compute_metrics
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.bench.report import uncounted
from chairlift.loadtest.bench.stream import ChunkListener, ReplyBuilder
from chairlift.loadtest.data.arrivals import arrival_offsets
from chairlift.loadtest.data.workload import WorkloadRequest, draw_lengths, random_requests


def _reply(start: float, chunks: list[float], **fields: Any) -> Reply:
    return Reply(10, start=start, end=chunks[-1], chunk_times=chunks, **fields)


def test_metrics_follow_vllms_definitions() -> None:
    replies = [
        # TTFT 1, E2EL 3, four tokens in three chunks: TPOT 2/3, ITLs 0.5 and 1.5.
        _reply(0.0, [1.0, 1.5, 3.0], usage_tokens=4),
        # One token: no TPOT, no ITL. TTFT = E2EL = 0.25.
        _reply(2.0, [2.25], usage_tokens=1),
        # No usage: its chunks are its tokens. TTFT 0.5, E2EL 0.75, TPOT = ITL = 0.25.
        _reply(2.5, [3.0, 3.25]),
        Reply(10, start=0.0, end=9.0, error="refused"),
    ]
    metrics = compute_metrics(replies, 5.0, {}, [50, 99])
    assert (metrics.completed, metrics.failed) == (3, 1)
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (30, 7)
    assert metrics.request_throughput == pytest.approx(3 / 5)
    assert metrics.output_throughput == pytest.approx(7 / 5)
    assert metrics.total_token_throughput == pytest.approx(37 / 5)
    assert metrics.request_goodput is None
    ttft, tpot, itl, e2el = (metrics.latencies[n] for n in ("ttft", "tpot", "itl", "e2el"))
    assert ttft.mean == pytest.approx(1000 * (1 + 0.25 + 0.5) / 3)
    assert ttft.median == pytest.approx(500)
    assert tpot.mean == pytest.approx(1000 * (2 / 3 + 0.25) / 2)
    assert itl.mean == pytest.approx(1000 * (0.5 + 1.5 + 0.25) / 3)
    assert itl.median == pytest.approx(500)
    assert itl.std == pytest.approx(1000 * float(np.std([0.5, 1.5, 0.25])))
    assert e2el.percentiles[50] == pytest.approx(750)
    # Second 3 has the chunks at 3.0, 3.0 and 3.25; the second reply has ended before the third.
    # The first of them is a third of four tokens.
    assert metrics.max_output_tokens_per_s == pytest.approx(4 / 3 + 2)
    assert metrics.max_concurrent_requests == 2


def test_metrics_of_a_run_where_all_failed_are_zero() -> None:
    metrics = compute_metrics([Reply(10, error="refused")], 1.0, {"ttft": 100.0}, [99])
    assert (metrics.completed, metrics.failed, metrics.total_output_tokens) == (0, 1, 0)
    assert metrics.latencies["ttft"].percentiles[99] == 0
    assert (metrics.request_goodput, metrics.max_concurrent_requests) == (0, 0)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 1000.0}, 2),
        ({"ttft": 999.0}, 1),
        ({"tpot": 100.0}, 1),  # a reply of one token always meets it
        ({"ttft": 1000.0, "e2el": 3000.0}, 2),
        ({"ttft": 100.0, "e2el": 3000.0}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(
    objectives: dict[str, float], good: int
) -> None:
    replies = [
        _reply(0.0, [1.0, 3.0], usage_tokens=2),
        _reply(0.0, [0.25], usage_tokens=1),
        Reply(10, error="refused"),
    ]
    metrics = compute_metrics(replies, 2.0, objectives, [99])
    assert metrics.request_goodput == pytest.approx(good / 2)


def test_a_deeply_nested_event_is_a_failure_of_its_reply() -> None:
    reply = Reply(10)
    ReplyBuilder(reply, lambda now: None).add(b'{"error": ' + b"[" * 100_000, 1.0)
    assert reply.error.startswith("malformed event: ")


def test_the_choices_of_an_event_may_be_null() -> None:
    builder = ReplyBuilder(Reply(10), lambda now: None)
    builder.add(b'{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": null}', 1.0)
    builder.add(b'{"choices": null, "usage": {"prompt_tokens": 3, "completion_tokens": 1}}', 2.0)
    reply = builder.build()
    assert (reply.error, reply.prompt_tokens, reply.usage_tokens) == ("", 3, 1)


def test_replies_without_usage_are_reported() -> None:
    counted = _reply(0.0, [1.0, 3.0], usage_tokens=5)
    counted_as_chunks = _reply(0.0, [1.0, 3.0])
    assert uncounted([counted, Reply(10, error="refused"), Reply(10, cancelled=True)]) == ""
    line = uncounted([counted, counted_as_chunks, Reply(10, error="refused")])
    assert line.startswith("1 of 2 replies had no usage: ")


@pytest.mark.parametrize("burstiness", [0.001, 1.0, 1e9, math.inf])
@pytest.mark.parametrize("rate", [1e-9, 1e9])
def test_arrivals_are_finite_over_the_range_of_the_flags(rate: float, burstiness: float) -> None:
    for seed in range(20):
        (only,) = arrival_offsets(1, rate, burstiness, np.random.default_rng(seed))
        assert only == pytest.approx(1 / rate)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_arrivals_keep_the_rate_and_have_the_burstiness(burstiness: float) -> None:
    offsets = arrival_offsets(4000, 8.0, burstiness, np.random.default_rng(1))
    assert offsets == arrival_offsets(4000, 8.0, burstiness, np.random.default_rng(1))
    assert offsets == sorted(offsets)
    assert offsets[-1] == pytest.approx(4000 / 8.0)
    gaps = np.diff(offsets)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.15, abs=1e-9)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_offsets(3, math.inf, 1.0, np.random.default_rng(0)) == [0.0] * 3


def test_range_ratio_is_uniform_over_both_ends() -> None:
    lengths = draw_lengths(10, 0.2, 2000, np.random.default_rng(0))
    assert set(lengths) == {8, 9, 10, 11, 12}
    assert draw_lengths(7, 0.0, 3, np.random.default_rng(0)) == [7, 7, 7]
    assert min(draw_lengths(1, 0.9, 100, np.random.default_rng(0))) == 1


async def test_random_prompts_have_the_requested_tokens_and_repeat_with_the_seed() -> None:
    async def count(text: str) -> int:
        # Long words are two tokens; a first token stands for BOS.
        return 1 + sum(1 + (len(word) > 5) for word in text.split())

    async def cannot_count(text: str) -> None:
        return None

    lens = [5, 50, 200]
    built = [await random_requests(lens, lens, np.random.default_rng(3), count) for _ in "ab"]
    assert built[0] == built[1]
    assert [await count(request.prompt) for request in built[0]] == pytest.approx(lens, abs=1)
    assert len({request.prompt.split()[0] for request in built[0]}) > 1
    by_words = await random_requests(lens, lens, np.random.default_rng(3), cannot_count)
    assert [len(request.prompt.split()) for request in by_words] == lens


async def test_a_client_that_is_too_slow_shows_in_the_queue_time() -> None:
    class SlowClient(OpenAIClient):
        async def complete(
            self, request: WorkloadRequest, on_chunk: ChunkListener = lambda now: None
        ) -> Reply:
            reply = Reply(request.prompt_len, start=time.perf_counter())
            time.sleep(0.1)  # noqa: ASYNC251 - the event loop is busy
            return reply

    requests = [WorkloadRequest("a", 1, 1)] * 3
    async with SlowClient("http://127.0.0.1:9") as client:
        progress = Progress(3, "bench", shown=False)
        replies, _ = await run_load(client, requests, [0.0, 0.01, 0.02], None, progress)
    assert [reply.queue_time for reply in replies] == pytest.approx([0, 0.09, 0.18], abs=0.08)
    assert replies[0].queue_time < replies[1].queue_time < replies[2].queue_time
