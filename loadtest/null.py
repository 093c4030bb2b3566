"""``python -m chairlift.loadtest.null``: measures the cost of everything except the model.

It serves a model with almost no work (``servers.null_model``) on the loopback interface. The rest
is as usual: scheduler, caches, sampling, messages between the processes, detokenizing, SSE. It
streams as many chats as there are rows, checks that every token arrived in a separate event, and
prints tokens per second and the CPU time per token of each process.

The engine is then faster than the API process, and the tokens of several steps arrive together.
With ``--step-ms`` each step sleeps, and the gaps between tokens show what the rest adds to a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.files import output_file
from chairlift.loadtest.bench.load import LoadResult, run_load
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.data.words import WORDS
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import LoadTestError, ServerError
from chairlift.loadtest.servers import peers, procfs
from chairlift.loadtest.servers.child import ChildServer, ServerSpec, exit_on_sigterm
from chairlift.loadtest.servers.procfs import CpuTime

ENDPOINT = "/v1/chat/completions"
START_LIMIT = 120.0
PROMPT_TOKENS = 16
WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class NullRun:
    """One run of all streams, from the first request sent to the last reply read.

    Attributes:
        tokens: generated tokens.
        duration: seconds.
        ttft: median and 99th percentile of the time to first token, in seconds.
        itl: median and 99th percentile of the inter-token latency, in seconds.
        cpu: CPU time by process; empty without /proc.
    """

    tokens: int
    duration: float
    ttft: tuple[float, float]
    itl: tuple[float, float]
    cpu: dict[str, CpuTime]

    @property
    def throughput(self) -> float:
        """Tokens delivered per second."""
        return self.tokens / self.duration

    def per_token(self, time: CpuTime) -> CpuTime:
        """CPU microseconds per token."""
        return CpuTime(time.user / self.tokens * 1e6, time.system / self.tokens * 1e6)


async def measure(
    spec: ServerSpec, server: int, streams: int, output_tokens: int, runs: int
) -> list[NullRun]:
    """Warms up the server and runs all streams ``runs`` times.

    Args:
        spec: the server.
        server: its process id.
        streams: the number of streams.
        output_tokens: output tokens of each.
        runs: the number of measured runs.

    Raises:
        ServerError: a reply failed, or lacks a token or a token's event.
    """
    async with OpenAIClient(
        spec.base_url, ENDPOINT, body={"temperature": 0, **spec.body}
    ) as client:
        client.model = await client.first_model()
        await run_streams(client, streams, WARM_TOKENS, "warm-up")
        results = []
        for number in range(runs):
            before = _cpu_times(server)
            replies, duration = await run_streams(
                client, streams, output_tokens, f"run {number + 1}"
            )
            used = {name: time.since(before[name]) for name, time in _cpu_times(server).items()}
            gaps = [gap for reply in replies for gap in reply.itls]
            results.append(
                NullRun(
                    sum(reply.output_tokens for reply in replies),
                    duration,
                    _percentiles([reply.ttft for reply in replies]),
                    _percentiles(gaps),
                    used,
                )
            )
    return results


async def run_streams(
    client: OpenAIClient, streams: int, output_tokens: int, what: str
) -> LoadResult:
    """Runs all streams at once, to their ends.

    Raises:
        ServerError: a reply failed, or lacks a token or a token's event.
    """
    requests = [
        WorkloadRequest(" ".join(_prompt(stream)), PROMPT_TOKENS, output_tokens)
        for stream in range(streams)
    ]
    result = await run_load(client, requests, [0.0] * streams, None, Progress(streams, what))
    for reply in result.replies:
        # The model's tokens are words, so the text also shows their number.
        counts = {reply.usage_tokens, len(reply.chunk_times), len(reply.text.split())}
        if not reply.ok or counts != {output_tokens}:
            raise ServerError(f"{what}: {reply.error or f'{counts} of {output_tokens} tokens'}")
    return result


def _prompt(stream: int) -> list[str]:
    """A prompt that shares no prefix with another stream's."""
    return [WORDS[(stream + step * (stream + 1)) % len(WORDS)] for step in range(PROMPT_TOKENS)]


def _cpu_times(server: int) -> dict[str, CpuTime]:
    if not procfs.available():
        return {}
    _, engine, *others = procfs.without_workers(procfs.tree(server))
    assert not others, "the server has one child, the engine process"
    named = {"engine process": engine, "API process": server, "load generator": os.getpid()}
    return {name: procfs.cpu_time(pid) for name, pid in named.items()}


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    median, high = np.percentile(values, (50, 99)) if values else (0.0, 0.0)
    return float(median), float(high)


def report(run: NullRun, streams: int) -> str:
    """One run as a table."""
    ttft, itl = ([f"{seconds * 1e3:.1f}" for seconds in times] for times in (run.ttft, run.itl))
    lines = [
        f"{streams} streams, {run.tokens} tokens in {run.duration:.2f} s: "
        f"{run.throughput:.0f} tokens/s",
        f"first token: median {ttft[0]} ms, p99 {ttft[1]}; next: median {itl[0]} ms, p99 {itl[1]}",
    ]
    if run.cpu:
        users, systems = zip(*run.cpu.values(), strict=True)
        rows = {**run.cpu, "all": CpuTime(sum(users), sum(systems))}
        lines.append(f"{'CPU, µs a token':18} {'user':>8} {'system':>8} {'both':>8}")
        for name, time in rows.items():
            each = run.per_token(time)
            lines.append(f"{name:18} {each.user:8.1f} {each.system:8.1f} {each.total:8.1f}")
    return "\n".join(lines)


def _as_json(run: NullRun) -> dict[str, Any]:
    return {
        "tokens": run.tokens,
        "seconds": run.duration,
        "tokens_per_second": run.throughput,
        "ttft_seconds": dict(zip(("median", "p99"), run.ttft, strict=True)),
        "itl_seconds": dict(zip(("median", "p99"), run.itl, strict=True)),
        "cpu_us_per_token": {name: run.per_token(time)._asdict() for name, time in run.cpu.items()},
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m chairlift.loadtest.null", description=__doc__)
    parser.add_argument(
        "--streams",
        type=int,
        default=256,
        help="concurrent chats, and rows of the batch (default: %(default)s)",
    )
    parser.add_argument(
        "--output-tokens", type=int, default=256, help="tokens of each reply (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=3, help="measured runs (default: %(default)s)")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="how long each step sleeps, as if an accelerator computed (default: not at all)",
    )
    parser.add_argument("--out", type=output_file, metavar="FILE", help="write all figures as JSON")
    given = parser.parse_args(argv)
    if min(given.streams, given.output_tokens, given.runs) < 1:
        parser.error("--streams, --output-tokens and --runs must be at least 1")
    if given.step_ms < 0:
        parser.error("--step-ms must be at least 0")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    given = _arguments(argv)
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="chairlift-null-") as folder:
        # In a child process, since this one must not load MLX.
        step = str(given.step_ms)
        writer = [sys.executable, "-m", "chairlift.loadtest.servers.null_model", folder, step]
        subprocess.run(writer, check=True)
        spec = peers.ours(Path(folder))
        spec = replace(
            spec, command=[*spec.command, "--max-rows", str(given.streams), "--trust-remote-code"]
        )
        try:
            with ChildServer(spec, START_LIMIT) as server:
                work = measure(spec, server.pid, given.streams, given.output_tokens, given.runs)
                runs = uvloop.run(work)
        except LoadTestError as error:
            print(f"null: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("null: interrupted", file=sys.stderr)
            return 130
    for run in runs:
        print(report(run, given.streams), flush=True)
    if given.out is not None:
        machine = {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        }
        load = {
            "streams": given.streams,
            "output_tokens": given.output_tokens,
            "step_ms": given.step_ms,
        }
        figures = {**machine, **load, "runs": [_as_json(run) for run in runs]}
        given.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
