"""``python -m chairlift.loadtest.compare``: measures this server and its peers under equal load.

It starts, measures and ends one server after the other on the loopback interface, and uses no other
network. Then it checks Chairlift's promises; the exit code is 0 if all hold, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvloop

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.files import output_file
from chairlift.loadtest.bench.load import run_load
from chairlift.loadtest.bench.metrics import compute_metrics
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.bench.verify import verification_report, verify_replies
from chairlift.loadtest.comparison import Comparison, ServerResult, comparison_report
from chairlift.loadtest.data.workload import WorkloadRequest, random_requests
from chairlift.loadtest.errors import LoadTestError, ServerError, UsageError
from chairlift.loadtest.scenarios import measure_idle, measure_long_prompt
from chairlift.loadtest.servers import peers
from chairlift.loadtest.servers.child import ChildServer, ServerSpec, exit_on_sigterm

SERVERS = ("ours", "mlx-lm", "llama")

_PERCENTILES = (50.0, 99.0)
_SEED = 20
_REPLY_LIMIT = 900.0
# More tokens than any server generates while it computes the long prompt; the rest is cancelled.
_LONG_STREAM_TOKENS = 1024
_LONG_REPLY_TOKENS = 8

_T = TypeVar("_T")


class SharedWorkload:
    """The requests, the same for all servers. The first server's tokenizer sizes the prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._built: dict[str, list[WorkloadRequest]] = {}

    async def requests(self, client: OpenAIClient) -> list[WorkloadRequest]:
        """The measured requests."""
        args = self._args
        return await self._get(
            "load", client, args.requests, args.prompt_tokens, args.output_tokens
        )

    async def warm_up(self, client: OpenAIClient) -> WorkloadRequest:
        """A request that shares no prompt with the measured ones."""
        args = self._args
        return (await self._get("warm-up", client, 1, args.prompt_tokens, args.output_tokens))[0]

    async def running(self, client: OpenAIClient) -> list[WorkloadRequest]:
        """The streams that run when the long prompt arrives."""
        args = self._args
        count = max(1, args.streams - 1)
        return await self._get("running", client, count, args.prompt_tokens, _LONG_STREAM_TOKENS)

    async def long(self, client: OpenAIClient) -> WorkloadRequest:
        """The long prompt."""
        tokens = self._args.long_prompt_tokens
        return (await self._get("long", client, 1, tokens, _LONG_REPLY_TOKENS))[0]

    async def _get(
        self, name: str, client: OpenAIClient, count: int, input_len: int, output_len: int
    ) -> list[WorkloadRequest]:
        if name not in self._built:
            rng = np.random.default_rng([_SEED, len(self._built)])
            self._built[name] = await random_requests(
                [input_len] * count, [output_len] * count, rng, client.count_tokens
            )
        return self._built[name]


def _starters(args: argparse.Namespace) -> list[Callable[[], ServerSpec]]:
    """For each server a function that returns its ``ServerSpec``, in the order of measuring."""
    model = _model_path(args)
    max_context = args.prompt_tokens + _LONG_STREAM_TOKENS
    if args.long_prompt_all:
        max_context = max(max_context, args.long_prompt_tokens + 2 * _LONG_REPLY_TOKENS)
    starters: dict[str, Callable[[], ServerSpec]] = {
        "ours": lambda: peers.ours(model, shlex.split(args.ours_args)),
        "mlx-lm": lambda: peers.mlx_lm(model, args.streams),
    }
    if args.llama_server is not None:
        binary = args.llama_server
        extra = shlex.split(args.llama_args)
        starters["llama"] = lambda: peers.llama(binary, model, args.streams, max_context, extra)
    elif "llama" in args.only:
        print("llama: left out, for it needs --llama-server", file=sys.stderr)
    return [starters[name] for name in args.only if name in starters]


def _model_path(args: argparse.Namespace) -> Path:
    if args.gguf is not None:
        path: Path = args.gguf
        if not path.exists():
            raise UsageError(f"--gguf: {path} does not exist")
        return path
    from chairlift.engine.config import DEFAULT_MODEL
    from chairlift.engine.hub.source import resolve

    return Path(resolve(DEFAULT_MODEL).path)


def _measure(spec: ServerSpec, workload: SharedWorkload, args: argparse.Namespace) -> ServerResult:
    with ChildServer(spec, args.start_limit) as server:
        result = _run(_measure_load(spec, workload, args))
        if spec.name == "ours":
            result.idle_percent = measure_idle(server.pid, args.idle_seconds)
    return result


async def _measure_load(
    spec: ServerSpec, workload: SharedWorkload, args: argparse.Namespace
) -> ServerResult:
    async with OpenAIClient(
        spec.base_url,
        model=spec.model,
        body={"temperature": 0, **spec.body},
        timeout=_REPLY_LIMIT,
    ) as client:
        client.model = client.model or await client.first_model()
        warm_up = await client.complete(await workload.warm_up(client))
        if not warm_up.ok:
            raise ServerError(f"{spec.name}: the warm-up request failed: {warm_up.error}")

        requests = await workload.requests(client)
        replies, duration = await run_load(
            client,
            requests,
            [0.0] * len(requests),
            args.streams,
            Progress(len(requests), spec.name),
        )
        result = ServerResult(
            name=spec.name,
            notes=spec.notes,
            metrics=compute_metrics(replies, duration, {}, _PERCENTILES),
            first_error=next((reply.error for reply in replies if not reply.ok), ""),
        )
        if spec.name == "ours":
            progress = Progress(result.metrics.completed, "ours, each alone")
            result.verification = await verify_replies(client, requests, replies, progress)
            print(verification_report(result.verification), flush=True)
        if spec.name == "ours" or args.long_prompt_all:
            print(f"{spec.name}: a long prompt arrives", file=sys.stderr, flush=True)
            running, long = await workload.running(client), await workload.long(client)
            if spec.min_tokens:
                running = [_without_end(request) for request in running]
            try:
                result.long_prompt = await measure_long_prompt(client, running, long)
            except ServerError as error:
                result.long_prompt_error = str(error)
    return result


def _without_end(request: WorkloadRequest) -> WorkloadRequest:
    # An end-of-text token that is only ignored has no text and no chunk, which would look like a
    # gap of two steps. With min_tokens it is never sampled (llama.cpp's ignore_eos does the same).
    return replace(request, body={"ignore_eos": False, "min_tokens": request.output_len})


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _arguments() -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m chairlift.loadtest.compare",
        description="Measures this server, mlx_lm.server and llama-server under the same load.",
    )
    add = parser.add_argument
    add("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server binary")
    add("--llama-args", default="", metavar="TEXT", help="more flags for llama-server")
    add("--ours-args", default="", metavar="TEXT", help="flags of ``chairlift serve``")
    add("--gguf", type=Path, metavar="FILE", help="the model (default: Chairlift's own)")
    add("--streams", type=int, default=16, help="requests in flight (default: %(default)s)")
    add(
        "--requests",
        type=int,
        default=32,
        help="requests of the ordinary load (default: %(default)s)",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=100,
        help="tokens of an ordinary prompt (default: %(default)s)",
    )
    add("--output-tokens", type=int, default=64, help="tokens of each reply (default: %(default)s)")
    add(
        "--long-prompt-tokens",
        type=int,
        default=4000,
        help="tokens of the prompt that arrives during the load (default: %(default)s)",
    )
    add("--long-prompt-all", action="store_true", help="send the long prompt to every server")
    add(
        "--idle-seconds",
        type=float,
        default=10.0,
        help="seconds for which an idle server's CPU time is measured (default: %(default)s)",
    )
    add(
        "--start-limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time limit for a server to start (default: %(default)s)",
    )
    add("--out", type=output_file, metavar="FILE", help="write all figures to a JSON file")
    add(
        "--only",
        type=lambda text: text.split(","),
        default=list(SERVERS),
        help=f"servers to measure, of {','.join(SERVERS)}",
    )
    args = parser.parse_args()
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the process with an error if a value is out of range."""
    for name in args.only:
        if name not in SERVERS:
            parser.error(f"--only {name}: choose from {', '.join(SERVERS)}")
    counts = (args.prompt_tokens, args.output_tokens, args.long_prompt_tokens)
    if min(args.streams, args.requests, *counts) < 1:
        parser.error("--streams, --requests and token counts must be at least 1")
    if not args.idle_seconds > 0:
        parser.error("--idle-seconds must be greater than 0")


def main() -> int:
    """Runs the comparison; returns the exit code."""
    args = _arguments()
    exit_on_sigterm()
    workload = SharedWorkload(args)
    results, all_measured, interrupted = [], True, False
    try:
        for start in _starters(args):
            try:
                result = _measure(start(), workload, args)
            except ServerError as error:
                # Go on: the other servers can still be measured, and the results reported.
                print(f"compare: {error}", file=sys.stderr)
                all_measured = False
            else:
                results.append(result)
    except LoadTestError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # The servers that have been measured are still reported.
        print("compare: interrupted", file=sys.stderr)
        interrupted = True
    if not results:
        return 130 if interrupted else 1
    comparison = Comparison(results)
    print(comparison_report(comparison))
    if args.out is not None:
        args.out.write_text(json.dumps(_as_json(args, comparison), indent=1), encoding="utf-8")
    if interrupted:
        return 130
    return 0 if all_measured and comparison.holds else 1


def _as_json(args: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    return {
        "date": datetime.now().isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": {
            "streams": args.streams,
            "requests": args.requests,
            "prompt_tokens": args.prompt_tokens,
            "output_tokens": args.output_tokens,
            "long_prompt_tokens": args.long_prompt_tokens,
        },
        "servers": {result.name: result.as_json() for result in comparison.results},
        "checks": [asdict(check) for check in comparison.checks],
    }


if __name__ == "__main__":
    sys.exit(main())
