"""``chairlift bench``: the flags of ``vllm bench serve``, and --verify."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from chairlift.loadtest.arrivals import arrival_offsets
from chairlift.loadtest.bench import run_load
from chairlift.loadtest.client import OpenAIClient
from chairlift.loadtest.config import BenchConfig
from chairlift.loadtest.errors import LoadTestError, ServerError, UsageError
from chairlift.loadtest.metrics import METRIC_NAMES, Reply, compute_metrics
from chairlift.loadtest.progress import Progress
from chairlift.loadtest.report import result_block, result_json, save_result
from chairlift.loadtest.verify import verification_report, verify_replies
from chairlift.loadtest.workload import Request, custom_requests, draw_lengths, random_requests

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``chairlift bench``."""
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add(
        "--endpoint",
        default="/v1/completions",
        help="path to send to; /v1/chat/completions sends chats (default: %(default)s)",
    )
    add("--model", help="model name to ask for (default: the first of GET /v1/models)")
    add("--api-key", help="bearer token (default: the environment's OPENAI_API_KEY)")
    add("--label", help="a name for this run, kept in the result file")
    add("--dataset-name", choices=["random", "custom"], default="random")
    add(
        "--dataset-path",
        metavar="FILE",
        help='custom: a JSONL file of {"prompt": text, "output_tokens": n (optional)}; its lines'
        " are sent in order, and again from the first if there are too few",
    )
    add("--num-prompts", type=int, default=1000, help="requests to send (default: %(default)s)")
    add("--num-warmups", type=int, default=0, help="requests sent before, not measured")
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests a second; inf sends all at once (default: %(default)s)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gamma-distributed gaps between arrivals: 1 is a Poisson process, less"
        " is burstier, more is more regular (default: %(default)s)",
    )
    add("--max-concurrency", type=int, help="most requests in flight (default: no limit)")
    add("--random-input-len", type=int, default=1024, help="prompt tokens (default: %(default)s)")
    add("--random-output-len", type=int, default=128, help="reply tokens (default: %(default)s)")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="both lengths vary uniformly in [len*(1-R), len*(1+R)] (default: %(default)s)",
    )
    add(
        "--custom-output-len",
        type=int,
        help="reply tokens of the custom data set (default: the file's own, else 256)",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="replies go on to their full length; always so with --dataset-name random",
    )
    add("--temperature", type=float, help="sampling temperature (default: left to the server)")
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives a good request meets, of ttft, tpot and e2el: ttft:500 tpot:50 e2el:5000",
    )
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        help=f"latencies to print, of {','.join(METRIC_NAMES)} (default: %(default)s)",
    )
    add("--metric-percentiles", default="99", help="such as 50,95,99 (default: %(default)s)")
    add("--save-result", action="store_true", help="write the result to a JSON file")
    add("--save-detailed", action="store_true", help="with every request's times and text")
    add("--result-dir", help="folder of the result file (default: this one)")
    add("--result-filename", help="its name (default: made of label, rate, model and date)")
    add(
        "--verify",
        action="store_true",
        help="temperature 0, and afterwards every request is sent again alone: the two replies"
        " must be equal",
    )
    add("--disable-tqdm", action="store_true", help="no live progress line")


def run(args: argparse.Namespace) -> int:
    """Runs the load test of these flags.

    Returns 0; 1 when a request failed, replies differ or the server is unusable; 2 for wrong flags.
    """
    try:
        config = config_from_args(args)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_bench(config))
    except LoadTestError as error:
        print(f"chairlift bench: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    except KeyboardInterrupt:
        print("chairlift bench: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def config_from_args(args: argparse.Namespace) -> BenchConfig:
    """The flags as a checked configuration.

    Raises:
        UsageError: a flag makes no sense.
    """
    values: dict[str, Any] = {
        name: getattr(args, name) for name in BenchConfig.__slots__ if hasattr(args, name)
    }
    values["api_key"] = args.api_key or os.environ.get("OPENAI_API_KEY")
    values["percentile_metrics"] = tuple(args.percentile_metrics.split(","))
    try:
        values["metric_percentiles"] = tuple(map(float, args.metric_percentiles.split(",")))
    except ValueError as error:
        raise UsageError(f"--metric-percentiles {args.metric_percentiles}: {error}") from error
    goodput = {}
    # One argument of several pairs, as from a quoted string, is fine too.
    for pair in " ".join(args.goodput).split():
        name, _, limit = pair.partition(":")
        try:
            goodput[name] = float(limit)
        except ValueError as error:
            raise UsageError(f"--goodput {pair}: give NAME:MILLISECONDS") from error
    values["goodput"] = goodput
    return BenchConfig(**values)


async def _bench(config: BenchConfig) -> int:
    body: dict[str, Any] = {}
    if config.sent_temperature is not None:
        body["temperature"] = config.sent_temperature
    if config.ignores_eos:
        body["ignore_eos"] = True
    async with OpenAIClient(
        config.base_url,
        config.endpoint,
        model=config.model,
        api_key=config.api_key,
        body=body,
    ) as client:
        client.model = client.model or await client.first_model()
        rng = np.random.default_rng(config.seed)
        requests = await _requests(config, client, rng)
        offsets = arrival_offsets(len(requests), config.request_rate, config.burstiness, rng)
        await _warm_up(config, client, requests[0])

        shown = not config.disable_tqdm
        replies, duration = await run_load(
            client,
            requests,
            offsets,
            config.max_concurrency,
            Progress(len(requests), "bench", shown=shown),
        )
        metrics = compute_metrics(replies, duration, config.goodput, config.metric_percentiles)
        print(result_block(config, metrics))
        _print_failures(replies)

        verification = None
        if config.verify:
            progress = Progress(metrics.completed, "verify", shown=shown)
            verification = await verify_replies(client, requests, replies, progress)
            print(verification_report(verification))

    if config.save_result:
        now = datetime.now()
        result = result_json(config, client.model, metrics, replies, verification, now)
        print(f"Result saved to {save_result(config, result)}")
    good = not metrics.failed and (verification is None or verification.passed)
    return EXIT_OK if good else EXIT_FAILED


async def _requests(
    config: BenchConfig, client: OpenAIClient, rng: np.random.Generator
) -> list[Request]:
    if config.dataset_path is not None:
        return custom_requests(
            Path(config.dataset_path), config.num_prompts, config.custom_output_len
        )
    count, ratio = config.num_prompts, config.random_range_ratio
    input_lens = draw_lengths(config.random_input_len, ratio, count, rng)
    output_lens = draw_lengths(config.random_output_len, ratio, count, rng)
    if await client.count_tokens("word") is None:
        print("The server has no /tokenize: random prompts have that many words, not tokens.")
    return await random_requests(input_lens, output_lens, rng, client.count_tokens)


async def _warm_up(config: BenchConfig, client: OpenAIClient, request: Request) -> None:
    for _ in range(config.num_warmups):
        reply = await client.complete(request)
        if not reply.ok:
            raise ServerError(f"the warm-up request failed: {reply.error}")


def _print_failures(replies: list[Reply]) -> None:
    errors = [reply.error for reply in replies if not reply.ok]
    if errors:
        print(f"{len(errors)} of {len(replies)} requests failed; the first: {errors[0]}")


def main() -> int:
    """``python -m chairlift.loadtest.cli``: the same as ``chairlift bench``."""
    parser = argparse.ArgumentParser(description="Load test of an OpenAI-compatible server.")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
