"""Builds the workload of a run: its requests and their arrival times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chairlift.loadtest.bench.config import BenchConfig
from chairlift.loadtest.bench.target import is_chat
from chairlift.loadtest.data.arrivals import arrival_offsets
from chairlift.loadtest.data.behaviour import misbehaving
from chairlift.loadtest.data.custom import custom_requests
from chairlift.loadtest.data.edit import edit_requests
from chairlift.loadtest.data.repetition import prefix_repetition_requests
from chairlift.loadtest.data.replay import read_requests, replayed
from chairlift.loadtest.data.sharegpt import sharegpt_requests
from chairlift.loadtest.data.workload import (
    TokenCounter,
    WorkloadRequest,
    draw_lengths,
    random_requests,
)


class Workload(NamedTuple):
    """The requests, and the arrival of each in seconds from the start, ascending."""

    requests: list[WorkloadRequest]
    offsets: list[float]


async def build_workload(
    config: BenchConfig, count_tokens: TokenCounter, built: Callable[[], None]
) -> Workload:
    """Builds the workload; it is determined by the configuration and the server's tokenizer.

    ``built`` is called after each request.

    Raises:
        UsageError: the data set cannot be used.
    """
    rng = np.random.default_rng(config.seed)
    if config.dataset_name == "trace":
        path = Path(config.dataset_path or "")
        rows = read_requests(path, config.num_prompts, config.duration)
        requests = await replayed(rows, rng, count_tokens, built)
        offsets = [row.arrival for row in rows]
    else:
        requests = await _requests(config, rng, count_tokens, built)
        offsets = _offsets(config, rng)
    # Drawn last, so that prompts and arrivals do not depend on how many clients misbehave.
    requests = misbehaving(
        requests,
        config.cancel_rate,
        config.slow_reader_rate,
        config.slow_reader_bytes_per_s,
        rng,
    )
    return Workload(requests, offsets)


async def _requests(
    config: BenchConfig,
    rng: np.random.Generator,
    count_tokens: TokenCounter,
    built: Callable[[], None],
) -> list[WorkloadRequest]:
    count, path = config.request_count, Path(config.dataset_path or "")
    if config.dataset_name == "custom":
        return custom_requests(path, count, config.custom_output_len)
    if config.dataset_name == "sharegpt":
        return await sharegpt_requests(
            path, count, config.sharegpt_output_len, rng, count_tokens, built
        )
    if config.dataset_name == "prefix_repetition":
        return await prefix_repetition_requests(
            count,
            config.prefix_repetition_prefix_len,
            config.prefix_repetition_suffix_len,
            config.prefix_repetition_num_prefixes,
            config.prefix_repetition_output_len,
            rng,
            count_tokens,
            built,
        )
    if config.dataset_name == "edit":
        chat = is_chat(config.endpoint)
        return await edit_requests(
            *(count, config.edit_len, chat, config.edit_prediction, rng, count_tokens, built)
        )
    ratio = config.random_range_ratio
    input_lens = draw_lengths(config.random_input_len, ratio, count, rng)
    output_lens = draw_lengths(config.random_output_len, ratio, count, rng)
    images = config.random_images
    if images is None:
        return await random_requests(input_lens, output_lens, rng, count_tokens, built)
    requests = await random_requests(input_lens, output_lens, rng, count_tokens)
    # Spawned, so that the arrivals are those of random prompts without images.
    return await images.added_to(requests, rng.spawn(1)[0], built)


def _offsets(config: BenchConfig, rng: np.random.Generator) -> list[float]:
    if config.ramp is not None:
        return config.ramp.offsets(config.request_count, config.burstiness, rng)
    return arrival_offsets(config.request_count, config.request_rate, config.burstiness, rng)
