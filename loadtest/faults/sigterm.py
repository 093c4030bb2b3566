"""SIGTERM under load: new requests are refused, running streams finish, and the exit code is 0."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path

import aiohttp
import uvloop

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.faults.scenario import Check, Outcome, Scenario
from chairlift.loadtest.faults.streams import Streams, child
from chairlift.loadtest.servers.child import ChildServer

_EXIT_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the scenario's flags."""
    add = parser.add_argument
    add("--streams", type=int, default=16, help="concurrent streams (default: %(default)s)")
    add("--output-tokens", type=int, default=128, help="tokens of a stream (default: %(default)s)")
    add(
        "--drain-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds that running requests get (default: %(default)g)",
    )


def run(model: Path, options: argparse.Namespace) -> Outcome:
    """Sends SIGTERM once all streams have begun."""
    flags = ("--max-rows", str(options.streams), "--drain-timeout", str(options.drain_timeout))
    with child(model, *flags) as server:
        return uvloop.run(_sigterm(server, options))


async def _sigterm(server: ChildServer, options: argparse.Namespace) -> Outcome:
    url = server.spec.base_url
    body = {"temperature": 0, "ignore_eos": True}
    async with OpenAIClient(url, body=body) as client:
        client.model = await client.first_model()
        async with Streams(client, options.streams, options.output_tokens) as streams:
            os.kill(server.pid, signal.SIGTERM)
            began = time.perf_counter()
            refused, health = await _ask(url)
            replies = await streams.replies()
            drained = time.perf_counter() - began
    code = await asyncio.to_thread(server.wait, _EXIT_SECONDS)
    ended = time.perf_counter() - began
    complete = [reply for reply in replies if reply.output_tokens == options.output_tokens]
    errors = [reply.error for reply in replies if reply.error]
    count = f"{len(complete)} of {len(replies)}"
    checks = [
        Check("all running streams finish", len(complete) == len(replies), f"{count} {errors[:3]}"),
        Check(
            "a new request is refused", refused == (503, True), f"status and Retry-After: {refused}"
        ),
        Check("/health is 503 during the drain", health == 503, str(health)),
        Check("the exit code is 0", code == 0, str(code)),
    ]
    figures = {
        "streams": len(replies),
        "whole": len(complete),
        "seconds": drained,
        "exit_code": code,
    }
    lines = [f"streams were done after {drained:.1f} s, the server had ended after {ended:.1f} s"]
    return Outcome(figures, lines, checks)


async def _ask(url: str) -> tuple[tuple[int, bool], int]:
    """Sends a new request once /health reports the drain.

    Returns:
        The request's status and whether its reply has Retry-After, and the status of /health.
    """
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/health") as reply:
                health = reply.status
            if health != 200:
                break
        body = {"prompt": "too late", "max_tokens": 1}
        async with http.post(f"{url}/v1/completions", json=body) as reply:
            return (reply.status, "Retry-After" in reply.headers), health


SIGTERM = Scenario("sigterm", "the server is asked to end under load", add_arguments, run)
