"""What one run of the load test does. The command line is a thin layer that builds this."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from chairlift.loadtest.errors import UsageError
from chairlift.loadtest.metrics import GOODPUT_METRICS, METRIC_NAMES

Backend = Literal["openai", "openai-chat"]


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The flags of ``vllm bench serve`` that apply, under their names.

    Lengths are tokens, ``request_rate`` is requests a second (inf: all at once), ``goodput`` maps
    ttft, tpot or e2el to the most milliseconds a good request takes.

    Raises:
        UsageError: a value is out of range, or two contradict each other.
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    model: str | None = None
    api_key: str | None = None
    label: str | None = None
    dataset_name: Literal["random", "custom"] = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    num_warmups: int = 0
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
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
    verify: bool = False
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        for wrong, message in (
            (self.num_prompts < 1, "--num-prompts must be at least 1"),
            (self.num_warmups < 0, "--num-warmups must not be negative"),
            (not self.request_rate > 0, "--request-rate must be greater than 0"),
            (not self.burstiness > 0, "--burstiness must be greater than 0"),
            (
                self.max_concurrency is not None and self.max_concurrency < 1,
                "--max-concurrency must be at least 1",
            ),
            (self.random_input_len < 1, "--random-input-len must be at least 1"),
            (self.random_output_len < 1, "--random-output-len must be at least 1"),
            (
                not 0 <= self.random_range_ratio < 1,
                "--random-range-ratio must be at least 0 and below 1",
            ),
            (
                self.custom_output_len is not None and self.custom_output_len < 1,
                "--custom-output-len must be at least 1",
            ),
            (
                not self.endpoint.endswith("/completions"),
                f"--endpoint must end with /completions or /chat/completions, not {self.endpoint}",
            ),
            (
                self.dataset_name == "custom" and self.dataset_path is None,
                "--dataset-name custom needs --dataset-path",
            ),
            (
                self.dataset_name == "random" and self.dataset_path is not None,
                "--dataset-path goes with --dataset-name custom",
            ),
            (
                self.verify and self.temperature not in (None, 0.0),
                f"--verify compares greedy replies; it contradicts --temperature"
                f" {self.temperature}",
            ),
            (
                not all(0 <= p <= 100 for p in self.metric_percentiles),
                "--metric-percentiles are between 0 and 100",
            ),
        ):
            if wrong:
                raise UsageError(message)
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

    @property
    def backend(self) -> Backend:
        """vLLM's name for the kind of endpoint."""
        return "openai-chat" if self.endpoint.endswith("/chat/completions") else "openai"

    @property
    def sent_temperature(self) -> float | None:
        """The temperature to send; None leaves it to the server."""
        return 0.0 if self.verify else self.temperature

    @property
    def ignores_eos(self) -> bool:
        """Random prompts always run to the wanted length, as in vLLM: they end nowhere sensible."""
        return self.ignore_eos or self.dataset_name == "random"
