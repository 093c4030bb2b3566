"""Metrics: every metric of the table is recorded, and counts what its help text says."""

from __future__ import annotations

import time

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.api.fake_engine import model_info, step_stats

from chairlift.engine.messages import FinishedChoice, StepStats
from chairlift.metrics.recorder import Recorder
from chairlift.metrics.table import ENGINE, MODEL, SERVER, token_buckets

MODEL_LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def recorder() -> Recorder:
    recorder = Recorder("1.2")
    recorder.model_loaded("m", model_info())
    return recorder


def value(recorder: Recorder, name: str, **labels: str) -> float | None:
    common = MODEL_LABELS if name.startswith("vllm:") else {}
    return recorder.registry.get_sample_value(name, {**common, **labels})


def test_every_metric_of_the_table_is_exposed_and_parses(recorder: Recorder) -> None:
    recorder.record_step(step_stats())
    recorder.record_prompt(1, 5)
    recorder.model_loaded("m", model_info(), seconds=1.5)
    recorder.record_models_memory(1 << 20)
    recorder.record_http("/health", "GET", 200, 0.1)
    recorder.record_disconnect()
    recorder.record_rejected("invalid")
    recorder.record_restart("crash")
    recorder.record_reload("failure")
    recorder.record_canary(diverged=True)
    recorder.record_lag(0.1)
    recorder.record_job("done")
    recorder.record_batch("completed")
    recorder.record_batch_request("failed")
    recorder.record_batches_running(1)
    recorder.record_batch_requests_running(1)
    at_work = generate_latest(recorder.registry).decode()
    recorder.model_unloaded("m", "idle")
    assert value(recorder, "chairlift_model_unloads_total", model_name="m", reason="idle") == 1
    families = {family.name: family for family in text_string_to_metric_families(at_work)}
    for metric in (*SERVER, *MODEL, *ENGINE):
        family = families[metric.name]
        assert family.type == metric.kind
        # The calls above moved every counter and histogram.
        total = sum(sample.value for sample in family.samples)
        assert total > 0 or metric.key == "model_unloads", metric.name


def test_counters_exist_at_zero_before_anything_happened(recorder: Recorder) -> None:
    for reason in ("stop", "length", "abort", "error"):
        assert value(recorder, "vllm:request_success_total", finished_reason=reason) == 0
    assert value(recorder, "vllm:prompt_tokens_total") == 0
    assert value(recorder, "vllm:generation_tokens_total") == 0
    assert value(recorder, "vllm:prompt_tokens_cached_total") == 0
    assert value(recorder, "vllm:prefix_cache_queries_total") == 0
    assert value(recorder, "vllm:prefix_cache_hits_total") == 0
    assert value(recorder, "chairlift_prefix_evictions_total") == 0
    assert value(recorder, "chairlift_kv_bytes", state="prefix") == 0
    assert value(recorder, "chairlift_requests_rejected_total", reason="queue_full") == 0
    assert value(recorder, "chairlift_client_disconnects_total") == 0
    assert value(recorder, "chairlift_engine_restarts_total", reason="hang") == 0


def test_an_engine_that_is_gone_uses_no_kv_memory(recorder: Recorder) -> None:
    swapped = "chairlift_swapped_bytes"
    recorder.record_step(step_stats())
    recorder.record_step(StepStats(swapped_bytes={"memory": 3000, "disk": 4000}))
    assert value(recorder, swapped, place="disk") == 4000
    recorder.record_step(StepStats(waiting=3))  # as after a crash, before the next engine's steps
    assert value(recorder, "vllm:kv_cache_usage_perc") == 0
    assert [value(recorder, swapped, place=place) for place in ("memory", "disk")] == [0, 0]
    recorder.record_step(step_stats())
    recorder.model_unloaded("m", "request")
    assert value(recorder, "vllm:kv_cache_usage_perc") == 0
    assert value(recorder, "chairlift_kv_bytes", state="used") == 0


def test_a_finished_choice_records_its_times(recorder: Recorder) -> None:
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


def test_the_time_after_the_last_token_is_no_decode_time(recorder: Recorder) -> None:
    # first token 103, last token 105; preempted, and aborted at 165
    choice = FinishedChoice(
        "abort", 10, 5, 16, 1, 100.0, 101.0, 103.0, finished=165.0, last_token=105.0
    )
    recorder.record_step(StepStats(finished=[choice]))
    assert value(recorder, "vllm:request_decode_time_seconds_sum") == 2.0
    assert value(recorder, "vllm:request_inference_time_seconds_sum") == 4.0
    assert value(recorder, "vllm:request_time_per_output_token_seconds_sum") == 0.5
    assert value(recorder, "vllm:e2e_request_latency_seconds_sum") == 65.0


def test_drafts_are_counted_by_position(recorder: Recorder) -> None:
    def accepted() -> list[float | None]:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        return [value(recorder, name, position=str(i)) for i in range(4)]

    assert accepted() == [0, 0, 0, None]
    drafts = StepStats(rows=4, drafts=4, draft_tokens=11, accepted_tokens=[0, 1, 3, 1])
    recorder.record_step(drafts)
    recorder.record_step(StepStats(rows=4))
    recorder.record_step(StepStats(rows=1, drafts=1, draft_tokens=2, accepted_tokens=[2]))
    assert accepted() == [4, 2, 1, None]
    assert value(recorder, "vllm:spec_decode_num_drafts_total") == 5
    assert value(recorder, "vllm:spec_decode_num_draft_tokens_total") == 13
    assert value(recorder, "vllm:spec_decode_num_accepted_tokens_total") == 7


def test_a_step_that_yields_several_tokens_a_row_counts_them_all(recorder: Recorder) -> None:
    recorder.record_step(StepStats(rows=2, output_tokens=7, inter_token_latencies=[0.1, 0.1]))
    assert value(recorder, "vllm:generation_tokens_total") == 7
    assert value(recorder, "vllm:inter_token_latency_seconds_count") == 2


def test_gauges_and_ratios(recorder: Recorder) -> None:
    recorder.record_step(step_stats())
    assert value(recorder, "vllm:kv_cache_usage_perc") == 0.5
    assert value(recorder, "vllm:num_requests_running") == 3
    assert value(recorder, "vllm:num_requests_waiting") == 2
    assert value(recorder, "chairlift_batch_padding_ratio_sum") == 0.25
    assert value(recorder, "chairlift_kv_bytes", state="reserved") == 4096
    assert value(recorder, "chairlift_memory_bytes", kind="peak") == 9
    assert value(recorder, "vllm:prompt_tokens_total") == 10 + 4
    assert value(recorder, "vllm:generation_tokens_total") == 2
    assert value(recorder, "vllm:iteration_tokens_total_sum") == 13


def test_prefix_counters_add_up_over_steps_and_bytes_are_the_last_value(recorder: Recorder) -> None:
    steps = [
        StepStats(rows=1, prefill_tokens=100, prefix_queries=100, prefix_bytes=3000),
        StepStats(rows=1, prefill_tokens=20, prefix_queries=100, prefix_hits=80, prefix_bytes=4000),
        StepStats(rows=2, prefix_evictions=3, prefix_bytes=1000),
        StepStats(),
        StepStats(rows=2, prefix_queries=50, prefix_hits=49, prefix_evictions=1, prefix_bytes=900),
    ]
    for stats in steps:
        recorder.record_step(stats)
    assert value(recorder, "vllm:prefix_cache_queries_total") == 250
    assert value(recorder, "vllm:prefix_cache_hits_total") == 129
    assert value(recorder, "vllm:prompt_tokens_cached_total") == 129
    # As in vLLM, computed tokens are the difference; cached tokens are not work of a step.
    assert value(recorder, "vllm:prompt_tokens_total") == 120 + 129
    assert value(recorder, "vllm:iteration_tokens_total_sum") == 120
    assert value(recorder, "chairlift_prefix_evictions_total") == 4
    assert value(recorder, "chairlift_kv_bytes", state="prefix") == 900


def test_computed_prompt_tokens_exclude_the_cached_ones(recorder: Recorder) -> None:
    recorder.record_step(step_stats(finished=2))  # prompts of 10 tokens, 4 of them cached
    name = "vllm:request_prefill_kv_computed_tokens"
    assert value(recorder, f"{name}_sum") == 2 * 6
    assert value(recorder, "vllm:request_prompt_tokens_sum") == 2 * 10
    # The counters come only from the step: two choices of one prompt are one lookup.
    assert value(recorder, "vllm:prompt_tokens_cached_total") == 4


@pytest.mark.parametrize(("bits", "label"), [(None, "none"), (8, "8")])
def test_the_cache_config_has_a_label_for_its_bits(bits: int | None, label: str) -> None:
    recorder = Recorder("1.2")
    info = model_info(kv_bits=bits)
    recorder.model_loaded("m", info)
    config = {
        "dtype": info.dtype,
        "kv_bits": label,
        "kv_limit_bytes": str(info.kv_limit_bytes),
        "kv_bytes_per_token": str(info.kv_bytes_per_token),
        "max_context": str(info.max_context),
        "max_rows": str(info.max_rows),
    }
    assert value(recorder, "vllm:cache_config_info", **config) == 1


def test_a_choice_that_never_ran_records_only_its_queue_time(recorder: Recorder) -> None:
    stats = step_stats()
    choice = stats.finished[0]
    choice.scheduled = choice.first_token = None
    choice.generated_tokens = 0
    choice.reason = "abort"
    recorder.record_step(stats)
    assert value(recorder, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(recorder, "vllm:request_queue_time_seconds_sum") == 7.0
    assert value(recorder, "vllm:request_prefill_kv_computed_tokens_count") == 0
    assert value(recorder, "vllm:request_prefill_time_seconds_count") == 0
    assert value(recorder, "vllm:request_decode_time_seconds_count") == 0


def test_token_buckets_end_at_the_context() -> None:
    assert token_buckets(250) == (1, 2, 5, 10, 20, 50, 100, 200, 250)
    assert token_buckets(1) == (1,)


def test_a_step_of_a_replay_counts_for_the_batch_but_for_no_request(recorder: Recorder) -> None:
    recorder.record_step(StepStats(rows=1, duration=0.5))
    assert value(recorder, "chairlift_batch_rows_count") == 1
    assert value(recorder, "vllm:iteration_tokens_total_count") == 0


def test_recording_a_step_of_256_rows_is_cheap(recorder: Recorder) -> None:
    stats = step_stats(latencies=[0.1] * 256)
    started = time.perf_counter()
    for _ in range(20):
        recorder.record_step(stats)
    assert (time.perf_counter() - started) / 20 < 0.01


def test_every_metric_names_its_source() -> None:
    """Fields exist in StepStats, methods in Recorder; a new metric without either fails here."""
    for metric in (*SERVER, *MODEL, *ENGINE):
        assert bool(metric.fields) != bool(metric.recorded_by), metric.key
        assert set(metric.fields) <= set(StepStats.__struct_fields__), metric.key
        assert not metric.recorded_by or hasattr(Recorder, metric.recorded_by), metric.key
