"""One run of ``chairlift bench``: builds the workload, sends it and prints the results."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from datetime import datetime
from typing import Any

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.config import BenchConfig
from chairlift.loadtest.bench.crosscheck import CrossCheck, MetricCheck, check_report
from chairlift.loadtest.bench.dataset import Workload, build_workload
from chairlift.loadtest.bench.load import LoadInterrupted, LoadResult, run_load, run_loop
from chairlift.loadtest.bench.metrics import Reply, compute_metrics
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.bench.report import failures, result_block, uncounted
from chairlift.loadtest.bench.result import BenchRun
from chairlift.loadtest.bench.server_metrics import QueuePoller, QueueSample
from chairlift.loadtest.bench.tokenizer import local_counter
from chairlift.loadtest.bench.verify import verification_report, verify_replies
from chairlift.loadtest.data.workload import TokenCounter, WorkloadRequest
from chairlift.loadtest.errors import ServerError


async def perform(config: BenchConfig) -> BenchRun:
    """Sends the load that ``config`` describes, and computes and prints its results.

    If the task is cancelled, as by Ctrl-C, after the load has begun, the results are those of the
    replies that have ended.

    Raises:
        UsageError: the data set cannot be used.
        ServerError: the server cannot be used, or lacks metrics that the flags require.
    """
    body: dict[str, Any] = {}
    if config.sent_temperature is not None:
        body["temperature"] = config.sent_temperature
    if config.ignores_eos:
        body["ignore_eos"] = True
    shown = not config.disable_tqdm
    async with OpenAIClient(
        config.base_url,
        config.endpoint,
        model=config.model,
        api_key=config.api_key,
        body=body,
    ) as client:
        client.model = client.model or await client.first_model()
        workload = await _prepare(config, client)
        await _warm_up(config, client, workload)
        check = await _begin_check(config, client)
        date = datetime.now()
        (replies, duration), samples, interrupted = await _send(
            config, client, workload, check is not None
        )
        metrics = compute_metrics(replies, duration, config.goodput, config.metric_percentiles)
        run = BenchRun(config, client.model, date, metrics, replies, samples, interrupted)
        if interrupted and not replies:
            print("Interrupted before any request had ended.")
            return run
        # Print these results before further requests to a server that may have stopped responding.
        print(result_block(config, metrics))
        print(failures(replies) + uncounted(replies), end="")
        if interrupted:
            print(f"Interrupted: the figures are of the {len(replies)} requests that had ended.")
            return run
        # A loop sends only some requests, or all of them several times.
        sent = list(itertools.islice(itertools.cycle(workload.requests), len(replies)))
        try:
            if check is not None:
                run = run._replace(checks=await _end_check(check, sent, replies, shown=shown))
            if config.verify:
                progress = Progress(metrics.completed, "verify", shown=shown)
                verification = await verify_replies(client, sent, replies, progress)
                print(verification_report(verification))
                run = run._replace(verification=verification)
            if config.html:
                run = run._replace(server_version=await client.server_version())
        except asyncio.CancelledError:
            _continue_after_cancellation()
            run = run._replace(interrupted=True)
    return run


def _continue_after_cancellation() -> None:
    """Lets this task, which has been cancelled, await again, so that it can clean up and report."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def _prepare(config: BenchConfig, client: OpenAIClient) -> Workload:
    count_tokens: TokenCounter = client.count_tokens
    if config.tokenizer is not None:
        count_tokens = local_counter(config.tokenizer)
    elif config.dataset_name != "custom" and await client.count_tokens("word") is None:
        print("The server has no /tokenize: prompts have that many words, not tokens.")
        count_tokens = _count_nothing
    count = None if config.dataset_name == "trace" else config.request_count
    progress = Progress(count, "workload", unit="prompts", shown=not config.disable_tqdm)
    # A file of prompts needs no tokenizer, so it is read at once, without progress.
    async with progress if config.dataset_name != "custom" else contextlib.nullcontext():
        return await build_workload(config, count_tokens, progress.add_done)


async def _count_nothing(text: str) -> None:
    """A ``TokenCounter`` that does not ask a server without /tokenize for every prompt."""


async def _warm_up(config: BenchConfig, client: OpenAIClient, workload: Workload) -> None:
    progress = Progress(config.num_warmups, "warm-up", shown=not config.disable_tqdm)
    async with progress if config.num_warmups else contextlib.nullcontext():
        for _ in range(config.num_warmups):
            reply = await client.complete(workload.requests[0].behaved, progress.add_chunk)
            progress.add_reply(reply)
            if not reply.ok:
                raise ServerError(f"the warm-up request failed: {reply.error}")


async def _begin_check(config: BenchConfig, client: OpenAIClient) -> CrossCheck | None:
    try:
        return await CrossCheck.begin(client, config.metrics_address)
    except ServerError as error:
        if config.check_metrics:
            raise
        print(f"Not compared with the server's metrics: {error}", file=sys.stderr)
        return None


async def _end_check(
    check: CrossCheck, sent: list[WorkloadRequest], replies: list[Reply], shown: bool
) -> list[MetricCheck] | None:
    try:
        checks = await check.end(sent, replies, shown)
    except ServerError as error:
        # Not raised, even with --check-metrics: the run's results are still to be saved.
        print(f"Not compared with the server's metrics: {error}", file=sys.stderr)
        return None
    print(check_report(checks))
    return checks


async def _send(
    config: BenchConfig, client: OpenAIClient, workload: Workload, has_metrics: bool
) -> tuple[LoadResult, list[QueueSample], bool]:
    """Sends the load; samples rows and queue length meanwhile if the HTML report needs them.

    The last value says whether the load was interrupted.
    """
    interrupted = False
    poller = QueuePoller(client, config.metrics_address)
    async with poller if config.html and has_metrics else contextlib.nullcontext():
        try:
            result = await _send_load(config, client, workload)
        except LoadInterrupted as interruption:
            _continue_after_cancellation()
            result, interrupted = interruption.result, True
    return result, poller.samples, interrupted


async def _send_load(config: BenchConfig, client: OpenAIClient, workload: Workload) -> LoadResult:
    shown = not config.disable_tqdm
    if config.loops:
        assert config.duration is not None
        assert config.max_concurrency is not None
        return await run_loop(
            client,
            workload.requests,
            config.max_concurrency,
            config.duration,
            Progress(None, f"bench, {config.duration:g} s", shown=shown),
        )
    progress = Progress(len(workload.requests), "bench", shown=shown)
    return await run_load(
        client, workload.requests, workload.offsets, config.max_concurrency, progress
    )
