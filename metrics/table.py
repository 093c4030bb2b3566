"""Every metric Chairlift exposes, as data; names, labels and buckets are vLLM's for what it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Bucket bounds in seconds, vLLM's; the inter-token ones start lower, for small models.
TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LAT = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION = (1.0, *(float(8 << i) for i in range(12)))
STEP = (0.0001, 0.0002, 0.0005, *ITL[:16])
ROWS = tuple(float(1 << i) for i in range(11))
RATIO = tuple(i / 10 for i in range(11))
LAG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Its attribute in the recorder is ``key``.

    ``buckets`` "tokens" stands for the 1-2-5 series up to the model's context. ``values`` are the
    values of its last label that exist from the start, at 0.
    """

    key: str
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | Literal["tokens"] = ()
    values: tuple[str, ...] = ()


def token_buckets(most: int) -> tuple[float, ...]:
    """The 1-2-5 series up to and including ``most`` tokens."""
    bounds = [
        float(digit * 10**power)
        for power in range(len(str(most)))
        for digit in (1, 2, 5)
        if digit * 10**power < most
    ]
    return (*bounds, float(most))


# Known before the model is: how the HTTP side is doing.
SERVER: tuple[Metric, ...] = (
    Metric(
        "http_requests",
        "chairlift_http_requests",
        "counter",
        "Replies by route, method and status; 499 is a client that left before its reply.",
        ("route", "method", "status"),
    ),
    Metric(
        "http_duration",
        "chairlift_http_request_duration_seconds",
        "histogram",
        "Seconds from a request's head to the end of its reply, streams included.",
        ("route",),
        LAT,
    ),
    Metric(
        "rejected",
        "chairlift_requests_rejected",
        "counter",
        "Requests refused before they reached the engine.",
        ("reason",),
        values=(
            *("invalid", "malformed", "context_length", "too_large", "unauthorized"),
            *("rate_limit", "queue_full", "unavailable", "draining", "connections"),
        ),
    ),
    Metric(
        "disconnects",
        "chairlift_client_disconnects",
        "counter",
        "Clients that left before their reply was complete.",
    ),
    Metric(
        "loop_lag",
        "chairlift_event_loop_lag_seconds",
        "histogram",
        "How late the API process's event loop was, ten times a second: no stream goes on then.",
        buckets=LAG,
    ),
    Metric(
        "worker_jobs",
        "chairlift_worker_jobs",
        "counter",
        "Grammars, large bodies and long texts read in worker processes, and what came of it.",
        ("outcome",),
        values=("done", "refused", "ended", "queue_full"),
    ),
    Metric(
        "restarts",
        "chairlift_engine_restarts",
        "counter",
        "Engine processes started in place of one that crashed, that hung, or that ended before it "
        "was ready.",
        ("reason",),
        values=("crash", "hang", "start"),
    ),
    Metric(
        "reloads",
        "chairlift_reloads",
        "counter",
        "Times that API keys or the certificate were read again (SIGHUP); after a failure, those "
        "from before stay.",
        ("outcome",),
        values=("success", "failure"),
    ),
    Metric(
        "canary_checked",
        "chairlift_canary_rows_checked",
        "counter",
        "Finished rows whose tokens were compared with those of a replay alone.",
    ),
    Metric(
        "canary_diverged",
        "chairlift_canary_rows_diverged",
        "counter",
        "Of these, rows whose replay alone gave other tokens.",
    ),
)

# One series a model: these carry model_name and engine in front of their own labels.
MODEL: tuple[Metric, ...] = (
    Metric("running", "vllm:num_requests_running", "gauge", "Choices that hold a row."),
    Metric("waiting", "vllm:num_requests_waiting", "gauge", "Choices that wait for a row."),
    Metric(
        "kv_usage", "vllm:kv_cache_usage_perc", "gauge", "KV memory in use; 1 is all of its limit."
    ),
    Metric(
        "prefix_queries",
        "vllm:prefix_cache_queries",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
    ),
    Metric(
        "prefix_hits",
        "vllm:prefix_cache_hits",
        "counter",
        "Prompt tokens found in the prefix cache.",
    ),
    Metric("preemptions", "vllm:num_preemptions", "counter", "Rows taken out to make room."),
    Metric(
        "prompt_tokens",
        "vllm:prompt_tokens",
        "counter",
        "Prompt tokens computed or taken from the prefix cache.",
    ),
    Metric(
        "prompt_cached",
        "vllm:prompt_tokens_cached",
        "counter",
        "Prompt tokens taken from the prefix cache instead of being computed.",
    ),
    Metric("generation_tokens", "vllm:generation_tokens", "counter", "Tokens generated."),
    Metric(
        "success",
        "vllm:request_success",
        "counter",
        "Finished choices by reason.",
        ("finished_reason",),
        values=("stop", "length", "abort", "error"),
    ),
    Metric(
        "request_prompt",
        "vllm:request_prompt_tokens",
        "histogram",
        "Prompt tokens of a finished choice.",
        buckets="tokens",
    ),
    Metric(
        "request_computed",
        "vllm:request_prefill_kv_computed_tokens",
        "histogram",
        "Prompt tokens of a finished choice that were not taken from the prefix cache.",
        buckets="tokens",
    ),
    Metric(
        "request_generation",
        "vllm:request_generation_tokens",
        "histogram",
        "Tokens generated by a finished choice.",
        buckets="tokens",
    ),
    Metric(
        "request_max_generation",
        "vllm:request_max_num_generation_tokens",
        "histogram",
        "Tokens generated by the longest of a prompt's n choices.",
        buckets="tokens",
    ),
    Metric(
        "params_max_tokens",
        "vllm:request_params_max_tokens",
        "histogram",
        "max_tokens of a finished choice.",
        buckets="tokens",
    ),
    Metric(
        "iteration_tokens",
        "vllm:iteration_tokens_total",
        "histogram",
        "Prompt and decode tokens computed in one step.",
        buckets=ITERATION,
    ),
    Metric(
        "params_n", "vllm:request_params_n", "histogram", "n of a finished prompt.", buckets=CHOICES
    ),
    Metric(
        "ttft",
        "vllm:time_to_first_token_seconds",
        "histogram",
        "Seconds from arrival to first token.",
        buckets=TTFT,
    ),
    Metric(
        "itl",
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Seconds between two tokens of a choice.",
        buckets=ITL,
    ),
    Metric(
        "tpot",
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "A finished choice's seconds from first to last token, per token after the first.",
        buckets=ITL,
    ),
    Metric(
        "e2e",
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "Seconds from arrival to a choice's end.",
        buckets=LAT,
    ),
    Metric(
        "queue_time",
        "vllm:request_queue_time_seconds",
        "histogram",
        "Seconds from arrival to first scheduled.",
        buckets=LAT,
    ),
    Metric(
        "inference_time",
        "vllm:request_inference_time_seconds",
        "histogram",
        "Seconds from first scheduled to last token.",
        buckets=LAT,
    ),
    Metric(
        "prefill_time",
        "vllm:request_prefill_time_seconds",
        "histogram",
        "Seconds from first scheduled to first token.",
        buckets=LAT,
    ),
    Metric(
        "decode_time",
        "vllm:request_decode_time_seconds",
        "histogram",
        "Seconds from first to last token.",
        buckets=LAT,
    ),
    Metric(
        "cache_config",
        "vllm:cache_config_info",
        "gauge",
        "The KV cache's settings; always 1.",
        ("dtype", "kv_bits", "kv_limit_bytes", "kv_bytes_per_token", "max_context", "max_rows"),
    ),
)

# Our own, of the one engine behind this server.
ENGINE: tuple[Metric, ...] = (
    Metric(
        "step_duration",
        "chairlift_step_duration_seconds",
        "histogram",
        'Seconds of a step by phase; phase "total" is the whole step.',
        ("phase",),
        STEP,
        ("schedule", "launch", "wait", "mask", "output", "total"),
    ),
    Metric(
        "grammar_seconds",
        "chairlift_grammar_compile_seconds",
        "histogram",
        "Seconds the engine took to compile a grammar that it did not have.",
        buckets=STEP,
    ),
    Metric(
        "grammar_hits",
        "chairlift_grammar_hits",
        "counter",
        "Requests whose grammar was compiled already.",
    ),
    Metric(
        "rows_failed",
        "chairlift_rows_failed",
        "counter",
        "Choices that ended as error because their own part of a step failed: logits or hidden "
        "states that are not finite, no token that may be chosen, a token outside of the "
        "vocabulary, a grammar, or anything else.",
        ("reason",),
        values=(
            *("nonfinite_logits", "nonfinite_hidden", "no_choice", "bad_token"),
            *("grammar", "other"),
        ),
    ),
    Metric("rows", "chairlift_batch_rows", "histogram", "Rows computed in a step.", buckets=ROWS),
    Metric(
        "padding",
        "chairlift_batch_padding_ratio",
        "histogram",
        "Padded columns of a step's batch divided by the columns it holds.",
        buckets=RATIO,
    ),
    Metric(
        "kv_bytes",
        "chairlift_kv_bytes",
        "gauge",
        "KV memory: reserved by buffers, used by tokens in them, and held by cached prefixes.",
        ("state",),
        values=("reserved", "used", "prefix"),
    ),
    Metric(
        "prefix_evictions",
        "chairlift_prefix_evictions",
        "counter",
        "Entries of the prefix cache dropped to make room.",
    ),
    Metric(
        "resumed",
        "chairlift_resumed_rows",
        "counter",
        "Preempted rows that began again, by where their state was kept: in memory or on disk, or "
        "nowhere, so that they were computed again; so are those of an engine that died.",
        ("source",),
        values=("memory", "disk", "recompute"),
    ),
    Metric(
        "swapped_bytes",
        "chairlift_swapped_bytes",
        "gauge",
        "Bytes of preempted rows' states kept in memory and on disk.",
        ("place",),
        values=("memory", "disk"),
    ),
    Metric(
        "store_files",
        "chairlift_prefix_store_files",
        "counter",
        "Files of prefixes on disk: written, read, dropped as the queue was full, failed to be "
        "written, evicted to make room, broken and therefore removed.",
        ("event",),
        values=("written", "read", "dropped", "failed", "evicted", "broken"),
    ),
    Metric(
        "store_io_bytes",
        "chairlift_prefix_store_io_bytes",
        "counter",
        "Bytes of these files written and read.",
        ("direction",),
        values=("written", "read"),
    ),
    Metric(
        "store_read_seconds",
        "chairlift_prefix_store_read_seconds",
        "counter",
        "Seconds in which they were read, while running requests went on.",
    ),
    Metric(
        "store_bytes",
        "chairlift_prefix_store_bytes",
        "gauge",
        "Bytes of these files on disk, and bytes in memory that wait to be written.",
        ("place",),
        values=("disk", "queue"),
    ),
    Metric(
        "memory",
        "chairlift_memory_bytes",
        "gauge",
        "MLX's memory in the engine process.",
        ("kind",),
        values=("active", "peak", "cache"),
    ),
    Metric(
        "build_info",
        "chairlift_build_info",
        "gauge",
        "What is running; always 1.",
        ("version", "architecture", "dtype", "device"),
    ),
)
