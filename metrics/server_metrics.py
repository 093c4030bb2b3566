"""Metrics of the HTTP server; they exist before the model is loaded."""

from __future__ import annotations

from chairlift.metrics.metric import LAG, LAT, Metric

SERVER: tuple[Metric, ...] = (
    Metric(
        "http_requests",
        "chairlift_http_requests",
        "counter",
        "Replies by route, method and status; 499: the client disconnected before the reply.",
        ("route", "method", "status"),
        recorded_by="record_http",
    ),
    Metric(
        "http_duration",
        "chairlift_http_request_duration_seconds",
        "histogram",
        "Seconds from a request's head to the end of its reply, streams included.",
        ("route",),
        LAT,
        recorded_by="record_http",
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
        recorded_by="record_rejected",
    ),
    Metric(
        "disconnects",
        "chairlift_client_disconnects",
        "counter",
        "Clients that disconnected before their reply was complete.",
        recorded_by="record_disconnect",
    ),
    Metric(
        "loop_lag",
        "chairlift_event_loop_lag_seconds",
        "histogram",
        "Delay of the API process's event loop, measured ten times a second; it delays all "
        "streams.",
        buckets=LAG,
        recorded_by="record_lag",
    ),
    Metric(
        "worker_jobs",
        "chairlift_worker_jobs",
        "counter",
        "Jobs of the worker processes (grammars, large bodies and long texts) by outcome.",
        ("outcome",),
        values=("done", "refused", "ended", "queue_full"),
        recorded_by="record_job",
    ),
    Metric(
        "batches",
        "chairlift_batches",
        "counter",
        "Batches of /v1/batches that ended, by their last status.",
        ("status",),
        values=("completed", "failed", "expired", "cancelled"),
        recorded_by="record_batch",
    ),
    Metric(
        "batch_requests",
        "chairlift_batch_requests",
        "counter",
        "Requests of batches whose result was saved, by outcome.",
        ("outcome",),
        values=("completed", "failed"),
        recorded_by="record_batch_request",
    ),
    Metric(
        "batches_running",
        "chairlift_num_batches_running",
        "gauge",
        "Batches that are running now.",
        recorded_by="record_batches_running",
    ),
    Metric(
        "batch_requests_running",
        "chairlift_num_batch_requests_running",
        "gauge",
        "Requests of batches that are running or queued now; vLLM's gauges have them, too.",
        recorded_by="record_batch_requests_running",
    ),
    Metric(
        "restarts",
        "chairlift_engine_restarts",
        "counter",
        "Restarts of the engine process after it crashed, hung, or ended before it was ready.",
        ("reason",),
        values=("crash", "hang", "start"),
        recorded_by="record_restart",
    ),
    Metric(
        "reloads",
        "chairlift_reloads",
        "counter",
        "Reloads of API keys or the certificate (SIGHUP); after a failure, the old ones stay in "
        "use.",
        ("outcome",),
        values=("success", "failure"),
        recorded_by="record_reload",
    ),
    Metric(
        "canary_checked",
        "chairlift_canary_rows_checked",
        "counter",
        "Finished rows whose tokens were compared with those of a replay (the canary).",
        recorded_by="record_canary",
    ),
    Metric(
        "canary_diverged",
        "chairlift_canary_rows_diverged",
        "counter",
        "Rows whose replay gave other tokens.",
        recorded_by="record_canary",
    ),
)
