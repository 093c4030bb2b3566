"""The table of every metric that Chairlift exposes; the recorder and the docs are built from it."""

from __future__ import annotations

from chairlift.metrics.engine_metrics import ENGINE
from chairlift.metrics.metric import Metric, token_buckets
from chairlift.metrics.model_metrics import MODEL
from chairlift.metrics.server_metrics import SERVER

__all__ = ["ENGINE", "MODEL", "SERVER", "Metric", "token_buckets"]
