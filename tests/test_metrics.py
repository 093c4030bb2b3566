"""Metrics: every name of the table is set by something, and means what metrics.md says."""

from __future__ import annotations

import time

import pytest
from fake_engine import model_info, step_stats
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.metrics.recorder import Recorder
from chairlift.metrics.table import ENGINE, MODEL, SERVER, token_buckets

MODEL_LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def recorder() -> Recorder:
    recorder = Recorder()
    recorder.model_loaded("m", model_info())
    return recorder


def value(recorder: Recorder, name: str, **labels: str) -> float | None:
    common = MODEL_LABELS if name.startswith("vllm:") else {}
    return recorder.registry.get_sample_value(name, {**common, **labels})


def test_every_metric_of_the_table_is_exposed_and_parses(recorder: Recorder) -> None:
    recorder.record_step(step_stats())
    recorder.record_prompt(1, 5)
    recorder.record_http("/health", "GET", 200, 0.1)
    recorder.record_disconnect()
    recorder.record_rejected("invalid")
    families = {
        family.name: family
        for family in text_string_to_metric_families(generate_latest(recorder.registry).decode())
    }
    for metric in (*SERVER, *MODEL, *ENGINE):
        family = families[metric.name]
        assert family.type == metric.kind
        # Whatever is listed is set: the one step above moved every counter and histogram.
        total = sum(sample.value for sample in family.samples)
        assert total > 0, metric.name


def test_counters_exist_at_zero_before_anything_happened(recorder: Recorder) -> None:
    for reason in ("stop", "length", "abort", "error"):
        assert value(recorder, "vllm:request_success_total", finished_reason=reason) == 0
    assert value(recorder, "vllm:prompt_tokens_total") == 0
    assert value(recorder, "vllm:generation_tokens_total") == 0
    assert value(recorder, "chairlift_requests_rejected_total", reason="queue_full") == 0
    assert value(recorder, "chairlift_client_disconnects_total") == 0


def test_times_of_a_finished_choice(recorder: Recorder) -> None:
    # arrival 100, scheduled 101, first token 103, finished 107; 5 tokens
    recorder.record_step(step_stats())
    sums = {
        "queue_time": 1.0,
        "prefill_time": 2.0,
        "decode_time": 4.0,
        "inference_time": 6.0,
        "time_per_output_token": 1.0,
    }
    for name, seconds in sums.items():
        assert value(recorder, f"vllm:request_{name}_seconds_sum") == seconds
    assert value(recorder, "vllm:e2e_request_latency_seconds_sum") == 7.0
    assert value(recorder, "vllm:time_to_first_token_seconds_sum") == 0.3


def test_gauges_and_ratios(recorder: Recorder) -> None:
    recorder.record_step(step_stats())
    assert value(recorder, "vllm:kv_cache_usage_perc") == 0.5
    assert value(recorder, "vllm:num_requests_running") == 3
    assert value(recorder, "vllm:num_requests_waiting") == 2
    assert value(recorder, "chairlift_batch_padding_ratio_sum") == 0.25
    assert value(recorder, "chairlift_kv_bytes", state="reserved") == 4096
    assert value(recorder, "chairlift_memory_bytes", kind="peak") == 9
    assert value(recorder, "vllm:prompt_tokens_total") == 10
    assert value(recorder, "vllm:generation_tokens_total") == 2
    assert value(recorder, "vllm:iteration_tokens_total_sum") == 13


def test_a_choice_that_never_ran_has_only_waited(recorder: Recorder) -> None:
    stats = step_stats()
    choice = stats.finished[0]
    choice.scheduled = choice.first_token = None
    choice.generated_tokens = 0
    choice.reason = "abort"
    recorder.record_step(stats)
    assert value(recorder, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(recorder, "vllm:request_queue_time_seconds_sum") == 7.0
    assert value(recorder, "vllm:request_prefill_time_seconds_count") == 0
    assert value(recorder, "vllm:request_decode_time_seconds_count") == 0


def test_made_up_methods_are_one_label_value(recorder: Recorder) -> None:
    for method in ("BREW", "WHEN"):
        recorder.record_http("unmatched", method, 404, 0.1)
    count = value(
        recorder,
        "chairlift_http_requests_total",
        route="unmatched",
        method="other",
        status="404",
    )
    assert count == 2


def test_token_buckets_end_at_the_context() -> None:
    assert token_buckets(250) == (1, 2, 5, 10, 20, 50, 100, 200, 250)
    assert token_buckets(1) == (1,)


def test_recording_a_step_of_256_rows_is_cheap(recorder: Recorder) -> None:
    stats = step_stats(latencies=[0.1] * 256)
    started = time.perf_counter()
    for _ in range(20):
        recorder.record_step(stats)
    assert (time.perf_counter() - started) / 20 < 0.01
