"""``python -m chairlift.loadtest.prefix MODEL...``: measures the prefix cache's effect on TTFT.

It serves each model on the loopback interface and sends requests with a shared prefix one after the
other. With ``--restart`` it then restarts the server with the same directory of prefixes. The exit
code is 1 if a later request, or the first one after the restart, takes more than LIMIT times as
long as the very first one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import uvloop

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.data.workload import WorkloadRequest, random_requests
from chairlift.loadtest.errors import LoadTestError, ServerError
from chairlift.loadtest.servers import peers
from chairlift.loadtest.servers.child import ChildServer, ServerSpec, exit_on_sigterm

LIMIT = 0.15
START_LIMIT = 180.0
_TAIL_TOKENS = 24
_REPLY_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Times:
    """TTFT of the first request and of the later ones, in seconds."""

    first: float
    later: list[float]

    @property
    def ratio(self) -> float:
        """The slowest later TTFT relative to the first."""
        return max(self.later) / self.first


async def measure(spec: ServerSpec, prefix_tokens: int, count: int, what: str) -> Times:
    """Sends ``count`` requests, one by one, that share ``prefix_tokens`` tokens.

    Raises:
        ServerError: a request failed.
    """
    rng = np.random.default_rng(7)
    async with OpenAIClient(spec.base_url, body=spec.body) as client:
        client.model = await client.first_model()
        sized = client.count_tokens
        warm, shared = await random_requests([32, prefix_tokens], [_REPLY_TOKENS] * 2, rng, sized)
        tails = await random_requests([_TAIL_TOKENS] * count, [_REPLY_TOKENS] * count, rng, sized)
        await client.complete(warm)
        async with Progress(count, what) as progress:
            first = await _time(client, _append(shared, tails[0]), progress)
            later = [await _time(client, _append(shared, t), progress) for t in tails[1:]]
    return Times(first, later)


def _append(shared: WorkloadRequest, tail: WorkloadRequest) -> WorkloadRequest:
    return replace(tail, prompt=f"{shared.prompt} {tail.prompt}")


async def _time(client: OpenAIClient, request: WorkloadRequest, progress: Progress) -> float:
    reply = await client.complete(request, progress.add_chunk)
    if not reply.ok:
        raise ServerError(f"a request failed: {reply.error}")
    progress.add_done()
    return reply.ttft


async def _run(model: Path, given: argparse.Namespace, directory: Path | None) -> list[Times]:
    results = []
    for what in ("cold", "restarted")[: 2 if directory else 1]:
        spec = peers.ours(model)
        if directory:
            spec = replace(spec, command=[*spec.command, "--prefix-cache-dir", str(directory)])
        with ChildServer(spec, START_LIMIT):
            name = f"{model.name}, {what}"
            results.append(await measure(spec, given.prefix_tokens, given.requests, name))
    return results


def _line(model: Path, results: Sequence[Times]) -> str:
    cold = results[0]
    text = (
        f"{model.name}: first {cold.first:.2f} s, later {np.median(cold.later):.2f} s "
        f"(slowest {max(cold.later):.2f}) = {cold.ratio:.3f} x (limit {LIMIT})"
    )
    if len(results) > 1:
        again = results[1].first
        text += f"; first after a restart {again:.2f} s = {again / cold.first:.3f} x"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = CommandParser(prog="python -m chairlift.loadtest.prefix", description=__doc__)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="file or directory")
    parser.add_argument(
        "--prefix-tokens",
        type=int,
        default=2000,
        help="tokens of the shared prefix (default: %(default)s)",
    )
    parser.add_argument(
        "--requests", type=int, default=32, help="requests that share it (default: %(default)s)"
    )
    parser.add_argument("--restart", action="store_true", help="also measure prefixes on disk")
    given = parser.parse_args(argv)
    if given.prefix_tokens < 1 or given.requests < 2:
        parser.error("--prefix-tokens must be at least 1, and --requests 2")
    exit_on_sigterm()
    passed = True
    for model in given.models:
        with tempfile.TemporaryDirectory(prefix="chairlift-prefix-") as scratch:
            directory = Path(scratch) if given.restart else None
            try:
                results = uvloop.run(_run(model, given, directory))
            except LoadTestError as error:
                print(f"{model.name}: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                print("prefix: interrupted", file=sys.stderr)
                return 130
        print(_line(model, results), flush=True)
        again = [result.first / results[0].first for result in results[1:]]
        passed = passed and max([results[0].ratio, *again]) <= LIMIT
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
