"""Sends far more requests than fit: refusals must be quick, and running streams must continue."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.faults.scenario import Check, Outcome, Scenario
from chairlift.loadtest.faults.streams import Streams, child, metric, request, until_metric

# More output tokens than any stream generates before the scenario ends it.
ENDLESS = 4000
MAX_MEDIAN_MS = 50.0
MIN_SHARE = 0.9
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Refusals:
    """The seconds to each refusal, and the errors of requests that were not refused."""

    seconds: list[float]
    errors: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the scenario's flags."""
    add = parser.add_argument
    add("--rows", type=int, default=8, help="rows of the batch (default: %(default)s)")
    add("--queue", type=int, default=8, help="requests that may wait (default: %(default)s)")
    add(
        "--times",
        type=int,
        default=10,
        help="requests, as a multiple of rows and queue together (default: %(default)s)",
    )
    add(
        "--seconds",
        type=float,
        default=10.0,
        help="time over which they are sent (default: %(default)g)",
    )
    add(
        "--rounds",
        type=int,
        default=3,
        help="measurements without and with overload, alternately (default: %(default)s)",
    )


def run(model: Path, options: argparse.Namespace) -> Outcome:
    """Watches the streams alternately undisturbed and under overload."""
    flags = ("--max-rows", str(options.rows), "--max-queue", str(options.queue))
    with child(model, *flags) as server:
        return uvloop.run(_overload(server.spec.base_url, options))


async def _overload(url: str, options: argparse.Namespace) -> Outcome:
    body = {"temperature": 0, "ignore_eos": True}
    refusals = Refusals([], [])
    quiet = flooded = 0
    async with OpenAIClient(url, body=body) as client:
        client.model = await client.first_model()
        # Alternating, so that other load on the machine affects both alike.
        for _ in range(options.rounds):
            async with Streams(client, options.rows, ENDLESS) as streams:
                start = time.perf_counter()
                await asyncio.sleep(options.seconds)
                quiet += streams.between(start, start + options.seconds)
            await until_metric(url, "vllm:num_requests_running", 0, _PATIENCE)
            async with Streams(client, options.rows, ENDLESS) as streams:
                flooded += await _flood(client, url, streams, options, refusals)
            await until_metric(url, "vllm:num_requests_running", 0, _PATIENCE)
        rejected = await metric(url, "chairlift_requests_rejected_total", reason="queue_full")
    seconds = options.seconds * options.rounds
    return _outcome(refusals, quiet / seconds, flooded / seconds, rejected)


async def _flood(
    client: OpenAIClient,
    url: str,
    streams: Streams,
    options: argparse.Namespace,
    refusals: Refusals,
) -> int:
    """Fills the queue and sends all other requests; returns the streams' tokens meanwhile."""
    waiting = [
        asyncio.create_task(client.complete(request(1000 + number, ENDLESS)))
        for number in range(options.queue)
    ]
    await until_metric(url, "vllm:num_requests_waiting", options.queue, _PATIENCE)
    start = time.perf_counter()
    count = options.times * (options.rows + options.queue)
    await _refused(client, count, options.seconds, refusals)
    await asyncio.sleep(start + options.seconds - time.perf_counter())
    tokens = streams.between(start, start + options.seconds)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return tokens


async def _refused(client: OpenAIClient, count: int, seconds: float, refusals: Refusals) -> None:
    """Sends requests evenly over a time, without waiting for replies."""

    async def send(number: int) -> None:
        await asyncio.sleep(number * seconds / count)
        began = time.perf_counter()
        reply = await client.complete(request(2000 + number, 64))
        if reply.error.startswith("HTTP 429"):
            refusals.seconds.append(time.perf_counter() - began)
        else:
            refusals.errors.append(reply.error or "it was served")

    await asyncio.gather(*map(send, range(count)))


def _outcome(refusals: Refusals, undisturbed: float, disturbed: float, rejected: float) -> Outcome:
    """Checks refusals and tokens per second; ``rejected`` is the server's count of refusals."""
    times = sorted(second * 1e3 for second in refusals.seconds) or [float("inf")]
    median, slowest = statistics.median(times), times[-1]
    p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
    share = disturbed / undisturbed if undisturbed else 0.0
    count = len(refusals.seconds)
    checks = [
        Check("all are refused with 429", not refusals.errors, f"{count}; {refusals.errors[:3]}"),
        Check("the server's metric counts as many", rejected == count, f"{rejected:g}"),
        Check(
            f"refused within {MAX_MEDIAN_MS:g} ms at the median",
            median < MAX_MEDIAN_MS,
            f"{median:.1f} ms, p99 {p99:.1f}, slowest {slowest:.1f}",
        ),
        Check(
            f"the streams keep {MIN_SHARE:g} of their throughput",
            share >= MIN_SHARE,
            f"{share:.3f}: {disturbed:.1f} of {undisturbed:.1f} tokens/s",
        ),
    ]
    figures = {
        "refused": count,
        "refusal_ms": {"median": median, "p99": p99, "max": slowest},
        "tokens_per_second": {"undisturbed": undisturbed, "disturbed": disturbed},
    }
    return Outcome(figures, [], checks)


OVERLOAD = Scenario("overload", "far more requests than there is room for", add_arguments, run)
