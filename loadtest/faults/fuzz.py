"""Thousands of bad requests: none may get a 5xx reply or hang, and the server must serve after it.

Some violate /openapi.json (schemathesis generates them), the others JSON or HTTP
(``bad_requests``). Other connections send a request head that never ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from chairlift.loadtest.faults.bad_requests import BadRequest, bad_requests
from chairlift.loadtest.faults.scenario import Check, Outcome, Scenario
from chairlift.loadtest.faults.streams import child

# Longer than any step of a small model.
PATIENCE = 30.0
# The server's default time limit, and by how much it may exceed it.
HEAD_SECONDS = 75.0
LATE_SECONDS = 15.0
AT_ONCE = 16
# Time limit for the reply to a complete request; an incomplete one is ended after it.
HALF_CLOSE_SECONDS = 0.5
SHARE_OF_SCHEMA = 0.4
_SHOWN = 20
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) ")


@dataclass(slots=True)
class FuzzReport:
    """Counts of requests and of reply statuses (0: connection closed), and a list of faults."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """The number of requests sent."""
        return sum(self.sent.values())

    def add(self, kind: str, status: int | None, what: str) -> None:
        """Records one request and its reply's status; None means that there was no reply."""
        self.sent[kind] += 1
        if status is None:
            self.failures.append(f"{kind}: no answer in {PATIENCE:g} s: {what}")
            return
        self.statuses[status] += 1
        if status >= 500 and status != 503:
            self.failures.append(f"{kind}: {status}: {what}")

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.sent.most_common())
        came = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        return f"{self.requests} requests: {kinds}\nanswers: {came}"


async def fuzz(
    url: str, requests: int, seed: int, head_seconds: float = HEAD_SECONDS
) -> FuzzReport:
    """Sends all bad requests to the server at ``url``.

    ``head_seconds`` is the server's time limit for a request's head.
    """
    report = FuzzReport()
    async with aiohttp.ClientSession() as http, http.get(f"{url}/openapi.json") as reply:
        schema = await reply.json()
    slow = [asyncio.create_task(_slow_head(url, report, head_seconds)) for _ in range(AT_ONCE)]
    by_schema = int(requests * SHARE_OF_SCHEMA)
    await asyncio.to_thread(_against_schema, url, schema, by_schema, seed, report)
    bad = islice(bad_requests(schema, seed), requests - report.requests)
    await asyncio.gather(*(_send_all(url, bad, report) for _ in range(AT_ONCE)))
    await asyncio.gather(*slow)
    await _check_it_serves(url, report)
    return report


def _against_schema(
    url: str, schema: dict[str, Any], requests: int, seed: int, report: FuzzReport
) -> None:
    # Imported here because the rest of the load test does not need these packages.
    import hypothesis
    import requests as http
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.core.result import Ok

    results = schemathesis.openapi.from_dict(schema).get_all_operations()
    operations = [result.ok() for result in results if isinstance(result, Ok)]
    operations = [operation for operation in operations if list(operation.body)]
    session = http.Session()
    for number, operation in enumerate(operations):

        def send(case: Any) -> None:
            arguments = case.as_transport_kwargs(base_url=url)
            what = f"{arguments['method']} {arguments['url']}: {str(arguments)[:500]}"
            try:
                status = session.request(**arguments, timeout=PATIENCE).status_code
            except http.Timeout:
                report.add("against the schema", None, what)
            except http.RequestException:
                # The client refuses to send it, or the server stopped reading.
                report.add("against the schema", 0, what)
            else:
                report.add("against the schema", status, what)

        test = hypothesis.given(
            case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        )(send)
        test = hypothesis.seed(seed + number)(test)
        hypothesis.settings(
            max_examples=max(1, requests // len(operations)),
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )(test)()


async def _send_all(url: str, bad: Iterator[BadRequest], report: FuzzReport) -> None:
    for request in bad:
        status: int | None
        try:
            async with asyncio.timeout(PATIENCE):
                status = await _send(url, request)
        except TimeoutError:
            status = None
        report.add(request.kind, status, repr(request.data[:300]))


async def _send(url: str, request: BadRequest) -> int:
    """The status of the reply, the highest one of several; 0 if there was none."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(request.data)
        if request.ending == "left":
            await asyncio.sleep(0.01)
            return 0
        await writer.drain()
        answer = b""
        if request.ending == "patient":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HALF_CLOSE_SECONDS):
                    answer = await reader.read(65536)
        # Also ends a connection that would be kept alive.
        if not reader.at_eof():
            writer.write_eof()
        answer += await reader.read()
        # There may be several replies: to pipelined requests, or after "100 Continue".
        return max(map(int, _STATUS.findall(answer)), default=0)
    except ConnectionError:
        return 0  # the server closed the connection during sending
    finally:
        writer.transport.abort()


async def _slow_head(url: str, report: FuzzReport, seconds: float) -> None:
    """Sends single bytes with pauses, until the server closes the connection."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    closed: int | None = 0
    began = time.monotonic()
    try:
        writer.write(b"GET /health HTTP/1.1\r\nX: ")
        while not reader.at_eof():
            if time.monotonic() - began > seconds + LATE_SECONDS:
                closed = None
                break
            writer.write(b"x")
            try:
                async with asyncio.timeout(min(1.0, seconds / 10)):
                    await reader.read(1)
            except TimeoutError:
                continue
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    report.add("slow head", closed, f"still open after {seconds + LATE_SECONDS:g} s")


async def _check_it_serves(url: str, report: FuzzReport) -> None:
    """Checks that a valid request is served and that nothing of the bad ones is left."""
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        body = {"prompt": "The sea is", "max_tokens": 4}
        async with http.post(f"{url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                report.failures.append(f"afterwards: {reply.status} {await reply.text()}")
        async with http.get(f"{url}/health") as reply:
            if reply.status != 200:
                report.failures.append(f"afterwards: {await reply.text()}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the scenario's flags."""
    parser.add_argument("--requests", type=int, default=5000, help="default: %(default)s")


def run(model: Path, options: argparse.Namespace) -> Outcome:
    """Runs the scenario against a new server."""
    # A short context limits the cost of a request that turns out to be valid.
    with child(model, "--max-context", "512", "--log-level", "warning") as server:
        report = asyncio.run(fuzz(server.spec.base_url, options.requests, options.seed))
    statuses = dict(sorted(report.statuses.items()))
    figures = {"requests": report.requests, "kinds": dict(report.sent), "statuses": statuses}
    failed = "; ".join(report.failures[:_SHOWN])
    checks = [
        Check("as many as asked for", report.requests >= options.requests, str(report.requests)),
        Check("no 5xx, no hang, and it serves afterwards", not report.failures, failed or "none"),
    ]
    return Outcome(figures, [str(report)], checks)


FUZZ = Scenario("fuzz", "thousands of bad requests", add_arguments, run)
