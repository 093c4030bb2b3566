"""The configuration of one run of the load test, which the command line builds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from chairlift.loadtest.bench.metrics import GOODPUT_METRICS, METRIC_NAMES
from chairlift.loadtest.bench.target import Backend, is_chat
from chairlift.loadtest.data.arrivals import Ramp
from chairlift.loadtest.data.random_images import BUCKETS, LIMITS, RandomImages
from chairlift.loadtest.data.workload import MAX_TOKENS
from chairlift.loadtest.errors import UsageError

DatasetName = Literal[
    "random", "random-mm", "prefix_repetition", "edit", "sharegpt", "custom", "trace"
]

# Data sets whose replies end at random, so that they run to full length, as in vLLM.
_RANDOM_DATASETS = ("random", "random-mm", "prefix_repetition", "trace")

# Data sets that are read from --dataset-path.
FILE_DATASETS = ("sharegpt", "custom", "trace")

# Beyond these, arrival times overflow; "inf" has a meaning of its own.
_RANGES = {
    "request_rate": (1e-9, 1e9),
    "ramp_up_start_rps": (1e-9, 1e9),
    "ramp_up_end_rps": (1e-9, 1e9),
    "burstiness": (1e-3, 1e9),
}
# All requests are built before the first is sent.
_MAX_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The settings of a run, named like the flags of ``vllm bench serve``, and some additions.

    The help texts in ``flags`` explain each setting. Lengths are in tokens. ``request_rate`` is in
    requests per second (inf: all at once), ``duration`` is the time in seconds during which
    requests are sent. ``cancel_rate`` and ``slow_reader_rate`` are fractions from 0 to 1.
    ``goodput`` maps ttft, tpot or e2el to the maximum in milliseconds for a good request.

    Raises:
        UsageError: a value is out of range, or two contradict each other.
    """

    backend: Backend = "openai"
    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    tokenizer: str | None = None
    model: str | None = None
    api_key: str | None = None
    label: str | None = None
    dataset_name: DatasetName = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    num_warmups: int = 0
    duration: float | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    cancel_rate: float = 0.0
    slow_reader_rate: float = 0.0
    slow_reader_bytes_per_s: float = 512.0
    max_concurrency: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_mm_base_items_per_request: int = 1
    random_mm_num_mm_items_range_ratio: float = 0.0
    random_mm_limit_mm_per_prompt: str = LIMITS
    random_mm_bucket_config: str = BUCKETS
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    edit_len: int = 512
    edit_prediction: bool = False
    sharegpt_output_len: int | None = None
    custom_output_len: int | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    seed: int = 0
    goodput: dict[str, float] = field(default_factory=dict)
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    metric_percentiles: tuple[float, ...] = (99.0,)
    save_result: bool = False
    save_detailed: bool = False
    result_dir: str | None = None
    result_filename: str | None = None
    html: str | None = None
    metrics_url: str | None = None
    check_metrics: bool = False
    verify: bool = False
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        for wrong, message in (*self._out_of_range(), *self._contradictions()):
            if wrong:
                raise UsageError(message)
        if self.random_images is not None and not is_chat(self.endpoint):
            raise UsageError("--dataset-name random-mm needs conversations: --backend openai-chat")
        for name in ("model", "api_key", "label"):
            text = getattr(self, name) or ""
            if any(ord(c) < ord(" ") or 0xD800 <= ord(c) < 0xE000 for c in text):
                raise UsageError(f"{_flag(name)} has a character that cannot be sent or printed")
        for name, limit in self.goodput.items():
            if name not in GOODPUT_METRICS or not limit >= 0:
                raise UsageError(
                    f"--goodput {name}:{limit:g}: give {', '.join(GOODPUT_METRICS)} and"
                    " milliseconds, for example ttft:500"
                )
        for name in self.percentile_metrics:
            if name not in METRIC_NAMES:
                raise UsageError(
                    f"--percentile-metrics {name}: choose from {', '.join(METRIC_NAMES)}"
                )

    def _out_of_range(self) -> Iterator[tuple[bool, str]]:
        """Yields for each limit whether it is violated, and the error text."""
        for name in (
            *("num_prompts", "max_concurrency", "random_input_len", "random_output_len"),
            *("prefix_repetition_prefix_len", "prefix_repetition_suffix_len"),
            *("prefix_repetition_num_prefixes", "prefix_repetition_output_len", "edit_len"),
            *("sharegpt_output_len", "custom_output_len"),
        ):
            count = getattr(self, name)
            yield count is not None and count < 1, f"{_flag(name)} must be at least 1"
            yield (
                count is not None and count > MAX_TOKENS,
                f"{_flag(name)} must be at most {MAX_TOKENS}",
            )
        for name in ("request_rate", "burstiness"):
            yield not getattr(self, name) > 0, f"{_flag(name)} must be greater than 0"
        for name in (
            *("duration", "ramp_up_start_rps", "ramp_up_end_rps"),
            "slow_reader_bytes_per_s",
        ):
            value = getattr(self, name)
            yield (
                value is not None and not 0 < value < math.inf,
                f"{_flag(name)} must be greater than 0, and a number",
            )
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            yield (
                value is not None and not low <= value <= high and not math.isinf(value),
                f"{_flag(name)} must be between {low:g} and {high:g}",
            )
        yield (
            self.temperature is not None and not math.isfinite(self.temperature),
            "--temperature must be a number",
        )
        for name in ("cancel_rate", "slow_reader_rate"):
            fraction = getattr(self, name)
            yield not 0 <= fraction <= 1, f"{_flag(name)} is a part of 1: between 0 and 1"
        for name in ("num_warmups", "seed"):
            yield getattr(self, name) < 0, f"{_flag(name)} must not be negative"
        yield (
            not 0 <= self.random_range_ratio < 1,
            "--random-range-ratio must be at least 0 and below 1",
        )
        yield (
            not all(0 <= p <= 100 for p in self.metric_percentiles),
            "--metric-percentiles are between 0 and 100",
        )

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Yields for each contradiction of settings whether it is there, and the error text."""
        needs_path = self.dataset_name in FILE_DATASETS
        yield (
            needs_path and self.dataset_path is None,
            f"--dataset-name {self.dataset_name} needs --dataset-path",
        )
        yield (
            not needs_path and self.dataset_path is not None,
            f"--dataset-path goes with --dataset-name {', '.join(FILE_DATASETS)}",
        )
        yield (
            self.edit_prediction and (self.dataset_name != "edit" or not is_chat(self.endpoint)),
            "--edit-prediction needs --dataset-name edit, and conversations: --backend openai-chat",
        )
        yield (
            self.api_key is not None and "@" in urlsplit(self.base_url).netloc,
            "--base-url has a user, so no API key can be sent, neither --api-key nor the"
            " environment's",
        )
        yield (
            self.verify and self.temperature not in (None, 0.0),
            f"--verify compares greedy replies; it contradicts --temperature {self.temperature}",
        )
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        given = [value is not None for value in (self.ramp_up_strategy, start, end)]
        yield (
            any(given) and not all(given),
            "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together",
        )
        yield (
            start is not None and end is not None and start >= end,
            "--ramp-up-start-rps must be below --ramp-up-end-rps",
        )
        yield (
            any(given) and not math.isinf(self.request_rate),
            "--ramp-up-strategy gives the rates; leave out --request-rate",
        )
        yield (
            self.dataset_name == "trace" and (any(given) or not math.isinf(self.request_rate)),
            "a trace says when requests arrive; leave out --request-rate and --ramp-up-strategy",
        )
        yield (
            self.loops and self.max_concurrency is None,
            "--duration needs --request-rate, --ramp-up-strategy, a trace or --max-concurrency",
        )
        yield (
            self.duration is not None and self.duration * self._highest_rate > _MAX_REQUESTS,
            f"--duration at this rate may be more than {_MAX_REQUESTS:,} requests",
        )

    @property
    def ramp(self) -> Ramp | None:
        """The increase of the request rate, or None if it is constant."""
        strategy, start, end = self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps
        if strategy is None or start is None or end is None:
            return None
        return Ramp(strategy, start, end)

    @property
    def random_images(self) -> RandomImages | None:
        """The images of random prompts, or None if they have none."""
        if self.dataset_name != "random-mm":
            return None
        return RandomImages.of(
            self.random_mm_base_items_per_request,
            self.random_mm_num_mm_items_range_ratio,
            self.random_mm_limit_mm_per_prompt,
            self.random_mm_bucket_config,
        )

    @property
    def loops(self) -> bool:
        """Whether each client sends one request after the other until ``duration`` is over."""
        return (
            self.duration is not None
            and math.isinf(self.request_rate)
            and self.ramp_up_strategy is None
            and self.dataset_name != "trace"
        )

    @property
    def _highest_rate(self) -> float:
        """The highest rate at which requests arrive; 0 if it is not known."""
        if self.ramp_up_end_rps is not None:
            return self.ramp_up_end_rps
        return 0.0 if math.isinf(self.request_rate) else self.request_rate

    @property
    def request_count(self) -> int:
        """The number of requests to build: from duration and rate if both are given."""
        if self.duration is None or self.loops or self.dataset_name == "trace":
            return self.num_prompts
        if self.ramp is not None:
            return self.ramp.count(self.duration)
        return max(1, round(self.request_rate * self.duration))

    @property
    def load(self) -> str:
        """Rate and concurrency as a short text."""
        if self.dataset_name == "trace":
            rate = "trace"
        elif self.ramp is not None:
            rate = f"{self.ramp.start:g} to {self.ramp.end:g} req/s"
        else:
            rate = "" if math.isinf(self.request_rate) else f"{self.request_rate:g} req/s"
        clients = "" if self.max_concurrency is None else f"{self.max_concurrency} at once"
        return ", ".join(filter(None, (rate, clients))) or "all at once"

    @property
    def metrics_address(self) -> str:
        """The URL of the server's metrics."""
        return self.metrics_url or f"{self.base_url.rstrip('/')}/metrics"

    @property
    def sent_temperature(self) -> float | None:
        """The temperature to send; None leaves it to the server."""
        return 0.0 if self.verify else self.temperature

    @property
    def ignores_eos(self) -> bool:
        """Whether replies run to full length."""
        return self.ignore_eos or self.dataset_name in _RANDOM_DATASETS


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
