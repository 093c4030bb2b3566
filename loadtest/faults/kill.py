"""Kills and stops the engine process under load; streams may only show a pause."""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.load import LoadResult, run_load
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.data.words import WORDS
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.faults.scenario import Check, Outcome, Scenario
from chairlift.loadtest.faults.server import FaultServer

_REPLY_LIMIT = 900.0
_PROMPT_WORDS = (5, 60)
# A signal is sent when a fraction of all tokens has arrived: the minimum and maximum fraction.
_MOMENTS = (0.05, 0.85)
# Seconds in which tokens of a killed engine may still arrive.
_IN_TRANSIT = 0.3
RESTARTS = "chairlift_engine_restarts_total"


@dataclass(frozen=True, slots=True)
class SentSignal:
    """A signal that was sent to the engine process.

    Attributes:
        signal: the signal.
        tokens: tokens that had arrived by then.
        at: the time in ``time.perf_counter()`` seconds.
        starting: whether the engine was still starting.
    """

    signal: signal.Signals
    tokens: int
    at: float
    starting: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the scenario's flags."""
    add = parser.add_argument
    add("--streams", type=int, default=64, help="concurrent streams (default: %(default)s)")
    add("--output-tokens", type=int, default=64, help="tokens of a stream (default: %(default)s)")
    add("--kills", type=int, default=3, help="number of SIGKILLs (default: %(default)s)")
    add(
        "--engine-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="time limit of the server's watchdog (default: %(default)g)",
    )


def run(model: Path, options: argparse.Namespace) -> Outcome:
    """See ``Scenario``."""
    return uvloop.run(_run(model, options))


async def _run(model: Path, options: argparse.Namespace) -> Outcome:
    rng = np.random.default_rng(options.seed)
    requests = [_request(number, options, rng) for number in range(options.streams)]
    flags = ("--engine-timeout", str(options.engine_timeout))
    async with (
        FaultServer(model, *flags, while_starting=_kill_starting) as server,
        OpenAIClient(server.spec.base_url, body=server.spec.body, timeout=_REPLY_LIMIT) as client,
    ):
        client.model = await client.first_model()
        alone = await _load(client, requests, Progress(len(requests), "undisturbed"))
        progress = Progress(len(requests), "disturbed")
        signalling = asyncio.create_task(_send_signals(server, progress, options, rng))
        disturbed = await _load(client, requests, progress)
        signals = await signalling
        checks = _compare_replies(alone.replies, disturbed.replies)
        checks += await _check_metrics(server, options.kills)
    figures, lines = _figures(alone, disturbed, signals)
    return Outcome(figures, lines, checks)


def _request(number: int, options: argparse.Namespace, rng: np.random.Generator) -> WorkloadRequest:
    """Makes a request; its kind depends on ``number``: greedy, sampled, penalties, logprobs."""
    length = int(rng.integers(*_PROMPT_WORDS))
    prompt = " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=length))
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 1.0},
        {"temperature": 0.8, "top_k": 10, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 1.0, "top_k": 10, "top_p": 0.9, "logprobs": 2},
    )
    body = {"seed": number, **kinds[number % 4]}
    return WorkloadRequest(prompt, length, options.output_tokens, body)


async def _load(
    client: OpenAIClient, requests: list[WorkloadRequest], progress: Progress
) -> LoadResult:
    """Sends all requests at once, with a cache salt of this run, so that no run reuses prefixes."""
    salted = [replace(r, body={**r.body, "cache_salt": progress.what}) for r in requests]
    return await run_load(client, salted, [0.0] * len(salted), None, progress)


async def _kill_starting(server: FaultServer) -> None:
    """Kills the first engine process while it loads."""
    await server.other_engine()
    await server.signal_engine(signal.SIGKILL)


async def _send_signals(
    server: FaultServer, progress: Progress, options: argparse.Namespace, rng: np.random.Generator
) -> list[SentSignal]:
    """Kills the engine at random moments, stops it once, and kills one successor as it starts."""
    share = np.sort(rng.uniform(*_MOMENTS, size=options.kills + 1))
    moments = share * options.streams * options.output_tokens
    stop = int(rng.integers(len(moments)))
    signals = []
    for number, moment in enumerate(moments):
        while progress.chunks < moment:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        # The tokens of two moments can arrive before the engine has died of the first signal.
        await server.healthy()
        kind = signal.SIGSTOP if number == stop else signal.SIGKILL
        pid = await server.signal_engine(kind)
        signals.append(SentSignal(kind, progress.chunks, time.perf_counter()))
        successor = await server.other_engine(than=pid)
        if number == 0:
            await asyncio.sleep(rng.uniform(0, 0.5))
            now = time.perf_counter()
            signals.append(SentSignal(signal.SIGKILL, progress.chunks, now, starting=True))
            await server.signal_engine(signal.SIGKILL)
            await server.other_engine(than=successor)
    return signals


def _compare_replies(alone: list[Reply], disturbed: list[Reply]) -> list[Check]:
    """Checks that the disturbed replies are complete and equal the undisturbed ones."""
    complete = [reply for reply in disturbed if reply.ok]
    errors = sorted({reply.error for reply in (*alone, *disturbed) if not reply.ok})
    equal = sum(
        one.ok and other.ok and (one.text, one.output_tokens) == (other.text, other.output_tokens)
        for one, other in zip(alone, disturbed, strict=True)
    )
    streams = len(disturbed)
    found = f"{len(complete)} of {streams}" + "".join(f"; {error}" for error in errors[:3])
    return [
        Check("all streams complete, without an error", len(complete) == streams, found),
        Check("tokens equal the undisturbed run's", equal == streams, f"{equal} of {streams}"),
    ]


async def _check_metrics(server: FaultServer, kills: int) -> list[Check]:
    """Checks the server's metrics afterwards."""
    expected = {"crash": kills, "hang": 1, "start": 2}
    counts = {reason: int(await server.metric(RESTARTS, reason=reason)) for reason in expected}
    left = [
        int(await server.metric(f"vllm:num_requests_{state}")) for state in ("running", "waiting")
    ]
    errors = int(await server.metric("vllm:request_success_total", finished_reason="error"))
    health = await server.health()
    return [
        Check("restarts are counted by their reason", counts == expected, str(counts)),
        Check("nothing runs or waits afterwards", left == [0, 0], f"{left[0]} and {left[1]}"),
        Check("no choice ended with an error", errors == 0, str(errors)),
        Check("the server is healthy afterwards", health.status == 200, str(health.status)),
    ]


def _figures(
    alone: LoadResult, disturbed: LoadResult, signals: list[SentSignal]
) -> tuple[dict[str, Any], list[str]]:
    times = sorted(time for reply in disturbed.replies for time in reply.chunk_times)
    lines = [f"undisturbed {alone.duration:.1f} s, disturbed {disturbed.duration:.1f} s"]
    pauses = []
    for sent in signals:
        pause = _pause(times, sent.at + _IN_TRANSIT)
        what = sent.signal.name + (" while it started" if sent.starting else "")
        lines.append(f"{what} after {sent.tokens} tokens: none came for {pause:.1f} s")
        pauses.append({"signal": what, "tokens": sent.tokens, "pause_seconds": pause})
    figures = {
        "streams": len(disturbed.replies),
        "tokens": sum(reply.output_tokens for reply in disturbed.replies),
        "undisturbed_seconds": alone.duration,
        "disturbed_seconds": disturbed.duration,
        "blows": pauses,
    }
    return figures, lines


def _pause(times: list[float], at: float) -> float:
    """Seconds from the last token before a time to the first one after it."""
    return next((after - before for before, after in pairwise(times) if before <= at < after), 0.0)


KILL = Scenario(
    "kill",
    "kill the engine at random moments and while it starts, and stop it until the watchdog acts",
    add_arguments,
    run,
)
