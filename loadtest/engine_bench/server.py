"""Measures the mixed load through a real server: the same requests over HTTP."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import uvloop

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.load import LoadResult, run_load
from chairlift.loadtest.bench.metrics import compute_metrics
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.engine_bench.load import Arrival, Load
from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.servers import peers
from chairlift.loadtest.servers.child import ChildServer, ServerSpec
from chairlift.loadtest.servers.random_model import write_random_model

# A large model takes minutes to read.
START_LIMIT = 900.0
_WARM_TOKENS = 16
_PERCENTILES = (50.0, 99.0)


def measure_server(
    options: argparse.Namespace, config: dict[str, object], dtype: mx.Dtype
) -> dict[str, float]:
    """Serves a model with random weights to the mixed load of ``options``; returns the figures.

    Raises:
        ValueError: there is no such model.
        ServerError: the server does not start, or a request fails.
    """
    vocabulary = config.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise ValueError("the model's config has no vocab_size")
    with tempfile.TemporaryDirectory(prefix="chairlift-bench-") as folder:
        write_random_model(config, dtype, options.bits, Path(folder))
        # The server needs the device's memory.
        gc.collect()
        mx.clear_cache()
        spec = peers.ours(Path(folder), _flags(options))
        load = Load(
            *(options.requests, options.prompt_tokens, options.output_tokens),
            *(options.rate, options.seed),
        )
        arrivals = list(load.draw(vocabulary))
        with ChildServer(spec, START_LIMIT):
            result = uvloop.run(_send(spec, arrivals, options.max_concurrency))
    return _figures(result)


def _flags(options: argparse.Namespace) -> list[str]:
    """The server's flags. Each prompt is random, so there is no prefix to keep."""
    flags = {
        "--max-rows": options.rows,
        "--kv-memory": None if options.kv_gb is None else int(options.kv_gb * 1e9),
        "--prefix-cache-bytes": 0,
        "--max-queue": options.requests,
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--log-level": "warning",
        "--kv-bits": options.kv_bits,
        "--max-step-ms": options.max_step_ms,
    }
    return [f"{name}={value}" for name, value in flags.items() if value is not None]


async def _send(
    spec: ServerSpec, arrivals: Sequence[Arrival], max_concurrency: int | None
) -> LoadResult:
    requests = [
        WorkloadRequest("", len(request.prompt), request.output, {"prompt": request.prompt})
        for _, request in arrivals
    ]
    async with OpenAIClient(spec.base_url, body={"temperature": 0, **spec.body}) as client:
        client.model = await client.first_model()
        warm = WorkloadRequest("", 1, _WARM_TOKENS, {"prompt": [2]})
        if error := (await client.complete(warm)).error:
            raise ServerError(f"the warm-up request failed: {error}")
        times = [arrival.at for arrival in arrivals]
        progress = Progress(len(requests), "server")
        result = await run_load(client, requests, times, max_concurrency, progress)
    for request, reply in zip(requests, result.replies, strict=True):
        if not reply.ok or reply.output_tokens != request.output_len:
            tokens = f"{reply.output_tokens} of {request.output_len} tokens"
            raise ServerError(f"a request failed: {reply.error or tokens}")
    return result


def _figures(result: LoadResult) -> dict[str, float]:
    metrics = compute_metrics(result.replies, result.duration, {}, _PERCENTILES)
    figures = {
        "output_tokens_per_s": metrics.output_throughput,
        "requests_per_s": metrics.request_throughput,
        "seconds": metrics.duration,
    }
    for name in ("ttft", "itl"):
        times = metrics.latencies[name]
        figures |= {f"{name}_p{p:.0f}_ms": times.percentiles[p] for p in _PERCENTILES}
    return figures
