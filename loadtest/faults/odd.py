"""Sends thousands of requests with extreme numbers; ordinary streams must not be affected.

Each field of each endpoint gets every value at and beyond its limits, alone and combined with
filters, penalties, grammars, choices and log-probabilities. The scenario checks that each reply is
a 200 or a 400 that names a field, that no engine process ends, and that the ordinary streams have
the same text as without such requests.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.data.words import WORDS
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.faults.kill import RESTARTS
from chairlift.loadtest.faults.odd_requests import OddRequest, odd_requests
from chairlift.loadtest.faults.scenario import Check, Outcome, Scenario
from chairlift.loadtest.faults.server import FaultServer

FAILED = "chairlift_rows_failed_total"
# The scenario ends early after this many faults.
_MAX_FAILURES = 40
_SHOWN = 10
_ROWS = 32
_VOCABULARY = re.compile(r"vocabulary of ([0-9]+)")


@dataclass(slots=True)
class OddReport:
    """The results.

    Attributes:
        sent: odd requests by path.
        statuses: their replies by status; 0: none.
        failures: their faults.
        repeats: replies of the ordinary streams.
        differing: descriptions of those that failed or differ from the first.
    """

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    repeats: int = 0
    differing: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """The number of odd requests that were answered or failed."""
        return self.sent.total()

    def add(self, request: OddRequest, status: int, text: str) -> None:
        """Records one reply. Status 0 means that there was none; ``text`` is then the error."""
        self.sent[request.path] += 1
        self.statuses[status] += 1
        if (why := fault(request, status, text)) is not None:
            body = json.dumps(request.body)[:600]
            self.failures.append(f"{why}: {request.path} {body}: {status} {text[:300]}")


def fault(request: OddRequest, status: int, text: str) -> str | None:
    """Describes a reply's fault; None if it has none."""
    if status == 400:
        error = _object(text).get("error", {})
        refusal = f"{error.get('param')} {error.get('message')}"
        named = [name for name in request.body if name in refusal]
        return None if named else "a 400 that names no field"
    if status != 200:
        return "neither 200 nor 400"
    if request.wrong is not None:
        return f"{request.wrong} was taken"
    events = [text]
    if request.body.get("stream"):
        lines = (line.removeprefix("data:").strip() for line in text.split("\n"))
        events = [line for line in lines if line.startswith("{")]
    faults = (why for event in events if (why := _event_fault(event)) is not None)
    return next(faults, None) if events else "a stream without events"


def _event_fault(event: str) -> str | None:
    """Describes the fault of a reply's body or of a stream's event; None if it has none."""
    try:
        reply = _object(event)
    except ValueError as error:
        return f"no JSON: {error}"
    kind = str(reply.get("type", ""))
    if reply.get("error") or kind in ("error", "response.failed"):
        return "an error inside of the reply"
    choices = reply.get("choices", [])
    if any(choice.get("finish_reason") in ("error", "abort") for choice in choices):
        return "a choice that ended as error"
    return None


def _object(text: str) -> dict[str, Any]:
    """Parses a JSON object; NaN and infinity are errors, since JSON does not have them."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} in the reply")

    value = json.loads(text, parse_constant=refuse)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the scenario's flags."""
    add = parser.add_argument
    add("--requests", type=int, default=4000, help="odd requests (default: %(default)s)")
    add(
        "--minutes",
        type=float,
        default=30.0,
        help="no further request is sent after this time (default: %(default)g)",
    )
    add("--clients", type=int, default=8, help="odd requests in flight (default: %(default)s)")
    add("--streams", type=int, default=8, help="ordinary streams (default: %(default)s)")
    add("--output-tokens", type=int, default=48, help="tokens of a stream (default: %(default)s)")
    add(
        "--patience",
        type=float,
        default=120.0,
        metavar="S",
        help="time limit of an odd request (default: %(default)g)",
    )


def run(model: Path, options: argparse.Namespace) -> Outcome:
    """See ``Scenario``."""
    return uvloop.run(_run(model, options))


async def _run(model: Path, options: argparse.Namespace) -> Outcome:
    # A short context limits the cost of a request that uses all of it.
    flags = ("--max-rows", str(_ROWS), "--max-queue", "4096", "--max-context", "512")
    report = OddReport()
    async with (
        FaultServer(model, *flags, "--log-level", "warning") as server,
        OpenAIClient(server.spec.base_url, timeout=options.patience * 4) as client,
    ):
        client.model = await client.first_model()
        engine = server.engine
        before = int(await server.metric(RESTARTS))
        ordinary = [_ordinary(number, options) for number in range(options.streams)]
        alone = [await client.complete(_salted(request, "alone")) for request in ordinary]
        if errors := [reply.error for reply in alone if not reply.ok]:
            raise ServerError(f"a stream fails alone: {errors[0]}")
        began = time.perf_counter()
        await _send_odd_requests(
            server.spec.base_url, client, list(zip(ordinary, alone, strict=True)), report, options
        )
        seconds = time.perf_counter() - began
        health = await server.health()
        restarts = int(await server.metric(RESTARTS)) - before
        failed = int(await server.metric(FAILED)) if health.status == 200 else -1
        same = server.engine == engine
        log_tail = server.log_tail
    checks = [
        Check(
            "each reply is 200 or a 400 that names a field",
            not report.failures,
            "; ".join(report.failures[:_SHOWN]) or "all",
        ),
        Check("no engine ended before it was ready", before == 0, f"{before} restarts"),
        Check("no engine ended later", same and restarts == 0, f"{restarts} restarts"),
        Check("no row failed", failed == 0, str(failed)),
        Check(
            "the streams' text is what it is alone",
            report.repeats > 0 and not report.differing,
            f"{report.repeats} replies; {report.differing[:_SHOWN] or 'none differs'}",
        ),
        Check("the server is healthy afterwards", health.status == 200, str(health.status)),
    ]
    figures = {
        "requests": report.requests,
        "paths": dict(report.sent),
        "statuses": dict(sorted(report.statuses.items())),
        "repeats": report.repeats,
        "differing": len(report.differing),
        "seconds": seconds,
    }
    lines = [f"{report.requests} odd requests in {seconds:.0f} s: {dict(report.statuses)}"]
    if not all(check.passed for check in checks):
        lines.append(f"the end of the server's log:\n{log_tail}")
    return Outcome(figures, lines, checks)


async def _send_odd_requests(
    url: str,
    client: OpenAIClient,
    ordinary: list[tuple[WorkloadRequest, Reply]],
    report: OddReport,
    options: argparse.Namespace,
) -> None:
    """Sends the odd requests while the ordinary streams repeat."""
    vocabulary = await _vocabulary_size(url)
    odd = itertools.islice(odd_requests(vocabulary, _ROWS, options.seed), options.requests)
    end = time.monotonic() + options.minutes * 60
    over = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=options.patience)
    progress = Progress(options.requests, "odd")
    async with progress, aiohttp.ClientSession(url, timeout=timeout) as http:
        streams = [
            asyncio.create_task(_repeat(client, number, request, reply, over, report))
            for number, (request, reply) in enumerate(ordinary)
        ]
        await asyncio.gather(
            *(_send_all(http, odd, end, report, progress) for _ in range(options.clients))
        )
        over.set()
        await asyncio.gather(*streams)


async def _send_all(
    http: aiohttp.ClientSession,
    odd: Iterator[OddRequest],
    end: float,
    report: OddReport,
    progress: Progress,
) -> None:
    """Sends one request after the other, until all are sent, time is up or faults are too many."""
    for request in odd:
        try:
            async with http.post(request.path, json=request.body) as reply:
                status, text = reply.status, await reply.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        report.add(request, status, text)
        progress.add_done()
        progress.failed = len(report.failures)
        if time.monotonic() > end or len(report.failures) >= _MAX_FAILURES:
            return


async def _repeat(
    client: OpenAIClient,
    number: int,
    request: WorkloadRequest,
    alone: Reply,
    over: asyncio.Event,
    report: OddReport,
) -> None:
    """Repeats one ordinary stream until the odd requests are done."""
    for run in itertools.count():
        reply = await client.complete(_salted(request, f"{run}"))
        if not reply.ok or (reply.text, reply.output_tokens) != (alone.text, alone.output_tokens):
            why = reply.error or f"{reply.text!r} for {alone.text!r}"
            report.differing.append(f"stream {number}, run {run}: {why}")
        report.repeats += 1
        if over.is_set() or len(report.differing) >= _MAX_FAILURES:
            return


def _ordinary(number: int, options: argparse.Namespace) -> WorkloadRequest:
    """Makes a stream's request: by ``number`` greedy, sampled, with filters or with penalties."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.8, "top_k": 10, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    )
    words = [WORDS[(number * 31 + step * (number + 1)) % len(WORDS)] for step in range(12)]
    body = {"seed": number, "ignore_eos": True, **kinds[number % len(kinds)]}
    return WorkloadRequest(" ".join(words), len(words), options.output_tokens, body)


def _salted(request: WorkloadRequest, salt: str) -> WorkloadRequest:
    """Adds a unique cache salt, so that nothing comes from the prefix cache."""
    body = {**request.body, "cache_salt": f"ordinary {salt}"}
    return WorkloadRequest(request.prompt, request.prompt_len, request.output_len, body)


async def _vocabulary_size(url: str) -> int:
    """The size of the model's vocabulary, which the server names when it refuses a token id."""
    async with (
        aiohttp.ClientSession(url) as http,
        http.post("/v1/completions", json={"prompt": [2**31 - 1]}) as reply,
    ):
        text = await reply.text()
    if (found := _VOCABULARY.search(text)) is None:
        raise ServerError(f"the refusal lacks the size of the vocabulary: {text[:200]}")
    return int(found[1])


ODD = Scenario(
    "odd",
    "thousands of requests with extreme numbers, beside ordinary streams",
    add_arguments,
    run,
)
