"""Sends expensive bodies one by one, which must not delay a stream or /health at the same time."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.faults.hostile_bodies import ENDPOINTS, Hostile, hostile_bodies
from chairlift.loadtest.faults.scenario import Check, Outcome, Scenario
from chairlift.loadtest.faults.streams import child, metric, request
from chairlift.loadtest.servers import procfs

# A reply that takes longer counts as none.
PATIENCE = 120.0
MAX_GRAMMAR_CHARS = 128 << 10
# Words of the prompts of ordinary requests, from a few to more than one step takes.
ORDINARY_WORDS = (8, 30, 60, 120, 250, 500, 1000)
# Memory allowed beyond the size of small bodies: imports and objects that are created once.
MEMORY_FLOOR = 32 << 20
_PROBE_SECONDS = 0.02
_SHOWN = 5
_NO_METRIC = -1.0


@dataclass(slots=True)
class HostileReport:
    """The measurements; each number comes with a description of the request that caused it.

    Attributes:
        statuses: replies by status; 0: none.
        answers: seconds to each reply.
        health: the longest wait for /health.
        stream: the longest pause between two events of the stream.
        ordinary: the same, beside ordinary requests with prompts of up to 1,000 words.
        own_lag: the longest lag of the load test's own event loop, which makes all waits as long.
        grown: growth of the API process during each request, in multiples of the body's size.
        failures: the faults found.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    answers: list[tuple[float, str]] = field(default_factory=list)
    health: tuple[float, str] = (0.0, "")
    stream: tuple[float, str] = (0.0, "")
    ordinary: tuple[float, str] = (0.0, "")
    own_lag: float = 0.0
    grown: list[tuple[float, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class _Others:
    """Watches a stream, /health and the memory of the API process."""

    def __init__(self, url: str, pid: int, report: HostileReport) -> None:
        self._url = url
        self._pid = pid
        self._report = report
        self.what = "nothing yet"
        self.peak = 0

    async def probe(self) -> None:
        """Requests /health repeatedly, until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as http:
            while True:
                what, began = self.what, time.perf_counter()
                try:
                    async with http.get(f"{self._url}/health") as reply:
                        await reply.read()
                        if reply.status != 200:
                            self._report.failures.append(f"/health {reply.status} beside {what}")
                except (aiohttp.ClientError, TimeoutError) as error:
                    self._report.failures.append(f"/health {error!r} beside {what}")
                taken = time.perf_counter() - began
                self._report.health = max(self._report.health, (taken, what))
                with suppress(OSError):
                    self.peak = max(self.peak, procfs.resident_bytes(self._pid))
                began = time.perf_counter()
                await asyncio.sleep(_PROBE_SECONDS)
                lag = time.perf_counter() - began - _PROBE_SECONDS
                self._report.own_lag = max(self._report.own_lag, lag)

    async def stream(self, client: OpenAIClient, tokens: int, begun: asyncio.Event) -> None:
        """Streams one reply after the other, until cancelled."""
        for number in count():
            last = [time.perf_counter()]

            def on_chunk(now: float, last: list[float] = last) -> None:
                begun.set()
                self._report.stream = max(self._report.stream, (now - last[0], self.what))
                last[0] = now

            reply = await client.complete(request(number, tokens), on_chunk)
            if reply.error:
                self._report.failures.append(f"the stream: {reply.error} beside {self.what}")
                begun.set()
                await asyncio.sleep(_PROBE_SECONDS)


async def _run(url: str, pid: int, options: argparse.Namespace) -> HostileReport:
    report = HostileReport()
    others = _Others(url, pid, report)
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    body = {"temperature": 0, "ignore_eos": True}
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        OpenAIClient(url, body=body) as client,
        Progress(options.requests, "hostile") as progress,
    ):
        client.model = await client.first_model()
        bodies = hostile_bodies(
            await _fields(http, url),
            options.seed,
            (64 << 10, 1 << 20, options.size << 20),
            min(MAX_GRAMMAR_CHARS, options.size << 20),
        )
        await _warm(http, url, bodies, report)
        begun = asyncio.Event()
        watchers = [
            asyncio.create_task(others.probe()),
            asyncio.create_task(others.stream(client, options.stream_tokens, begun)),
        ]
        try:
            async with asyncio.timeout(PATIENCE):
                await begun.wait()
            # Before the first event the model was still warming up.
            report.stream = report.health = (0.0, "")
            await _send_ordinary(http, url, others)
            report.ordinary, report.stream = report.stream, (0.0, "")
            for _ in range(options.requests):
                # In a thread: building a large body takes a second, in which the watchers, which
                # share this event loop, would measure the load test instead of the server.
                hostile = await asyncio.to_thread(next, bodies)
                await _send(http, url, pid, hostile, others, report)
                progress.add_done()
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
    return report


async def _fields(http: aiohttp.ClientSession, url: str) -> dict[str, list[str]]:
    """The names of the fields of each endpoint."""
    async with http.get(f"{url}/openapi.json") as reply:
        document = await reply.json()
    schemas = document["components"]["schemas"]
    fields = {}
    for path in ENDPOINTS:
        content = document["paths"][path]["post"]["requestBody"]["content"]
        schema: dict[str, Any] = content["application/json"]["schema"]
        name = schema["$ref"].rpartition("/")[2] if "$ref" in schema else None
        fields[path] = sorted((schemas[name] if name else schema).get("properties", {}))
    return fields


async def _warm(
    http: aiohttp.ClientSession, url: str, bodies: Iterator[Hostile], report: HostileReport
) -> None:
    """Makes the server import modules and start workers before anything is measured."""
    large = b'{"prompt":"hi","max_tokens":1,"unknown":[' + b"[]," * 50_000 + b"[]]}"
    for text in (large, b'{"prompt":"hi","max_tokens":1,"guided_regex":"a+"}'):
        await _post(http, url, Hostile("warm", "/v1/completions", text))


async def _send_ordinary(http: aiohttp.ClientSession, url: str, others: _Others) -> None:
    """Sends each ordinary request twice: a stream also waits for the prompts of its neighbours."""
    for words in ORDINARY_WORDS * 2:
        others.what = f"an ordinary prompt of {words} words"
        body = json.dumps({"prompt": "word " * words, "max_tokens": 1}).encode()
        await _post(http, url, Hostile("ordinary", "/v1/completions", body))


async def _post(http: aiohttp.ClientSession, url: str, hostile: Hostile) -> int | None:
    """Returns the reply's status; None without a reply in time, 0 if the connection failed."""
    headers = {"Content-Type": "application/json"}
    try:
        async with http.post(
            url + hostile.path, data=io.BytesIO(hostile.body), headers=headers
        ) as reply:
            await reply.read()
            return reply.status
    except TimeoutError:
        return None
    except aiohttp.ClientError:
        return 0


async def _send(
    http: aiohttp.ClientSession,
    url: str,
    pid: int,
    hostile: Hostile,
    others: _Others,
    report: HostileReport,
) -> None:
    size = len(hostile.body)
    what = f"{hostile.kind} at {hostile.path} ({size} bytes)"
    others.what = what
    before = others.peak = procfs.resident_bytes(pid)
    began = time.perf_counter()
    status = await _post(http, url, hostile)
    report.answers.append((time.perf_counter() - began, what))
    report.statuses[status or 0] += 1
    # The server may refuse a body that is too large before reading all of it.
    if status is None or status >= 500 or (status == 0 and size < 1 << 20):
        report.failures.append(f"{'no answer' if status is None else status}: {what}")
    report.grown.append(((others.peak - before) / max(size, MEMORY_FLOOR / 10), what))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the scenario's flags."""
    add = parser.add_argument
    add("--requests", type=int, default=400, help="each kind comes first (default: %(default)s)")
    add("--size", type=int, default=16, metavar="MiB", help="largest body (default: %(default)s)")
    add(
        "--pause",
        type=float,
        default=0.25,
        metavar="S",
        help="limit for /health, and for how much longer the stream pauses than beside ordinary "
        "requests (default: %(default)g)",
    )
    add(
        "--answer",
        type=float,
        default=10.0,
        metavar="S",
        help="limit for the reply to a hostile request (default: %(default)g)",
    )
    add(
        "--memory",
        type=float,
        default=10.0,
        metavar="TIMES",
        help="limit for the API process's growth, in body sizes (default: %(default)g)",
    )
    add("--stream-tokens", type=int, default=1024, help="tokens of a stream (default: %(default)s)")


def run(model: Path, options: argparse.Namespace) -> Outcome:
    """Runs the scenario against a new server."""
    if not procfs.available():
        raise ServerError("this needs a /proc to read the memory of the API process")
    flags = ("--max-body-bytes", str(options.size << 20), "--log-level", "error")
    with child(model, *flags) as server:
        url = server.spec.base_url
        report = asyncio.run(_run(url, server.pid, options))
        late = asyncio.run(_late(url, options.pause))
    return _outcome(report, late, options)


async def _late(url: str, seconds: float) -> float:
    """Counts the lags of the server's event loop above ``seconds``; _NO_METRIC if unknown."""
    name = "chairlift_event_loop_lag_seconds"
    bounds = str(float(seconds))
    within = await metric(url, f"{name}_bucket", le=bounds)
    return await metric(url, f"{name}_count") - within if within else _NO_METRIC


def _outcome(report: HostileReport, late: float, options: argparse.Namespace) -> Outcome:
    slowest = max(report.answers, default=(0.0, ""))
    grown = max(report.grown, default=(0.0, ""))
    statuses = str(dict(sorted(report.statuses.items())))
    failed = "; ".join(report.failures[:_SHOWN]) or "none"

    def below(what: str, found: tuple[float, str], limit: float, unit: str) -> Check:
        return Check(
            f"{what} below {limit:g} {unit}",
            found[0] < limit,
            f"{found[0]:.3f} {unit}, beside {found[1]}",
        )

    checks = [
        Check("all requests were sent", len(report.answers) >= options.requests, statuses),
        Check("no 5xx, and all are answered", not report.failures, failed),
        below("the longest wait for /health", report.health, options.pause, "s"),
        Check(
            f"the stream pauses less than {options.pause:g} s longer than beside ordinary requests",
            report.stream[0] < report.ordinary[0] + options.pause,
            f"{report.stream[0]:.3f} s, beside {report.stream[1]}; "
            f"{report.ordinary[0]:.3f} s, beside {report.ordinary[1]}",
        ),
        below("the slowest answer", slowest, options.answer, "s"),
        below("the API process's growth", grown, options.memory, "times the body"),
    ]
    figures = {
        "requests": len(report.answers),
        "statuses": dict(sorted(report.statuses.items())),
        "health_seconds": report.health[0],
        "stream_pause_seconds": report.stream[0],
        "ordinary_pause_seconds": report.ordinary[0],
        "own_lag_seconds": report.own_lag,
        "answer_seconds": slowest[0],
        "memory_times": grown[0],
        "loop_later_than_pause": late if late != _NO_METRIC else None,
    }
    lines = [f"{seconds:7.2f} s  {what}" for seconds, what in sorted(report.answers)[-_SHOWN:]]
    lines.append(f"{report.own_lag:7.2f} s  the longest lag of the load test's own event loop")
    return Outcome(figures, lines, checks)


HOSTILE = Scenario("hostile", "expensive bodies for every endpoint", add_arguments, run)
