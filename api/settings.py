"""The HTTP server's settings. The command line is a thin layer that builds this."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.engine.logs import LogFormat


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the model is offered over HTTP.

    ``served_model_name`` None is the model's own name. ``keep_alive_seconds`` is the longest a
    stream stays silent before a comment line is sent. ``grace_seconds`` is how long requests may
    go on once the server was asked to stop. ``log_format`` is "text" or "json". Every
    ``canary_interval`` seconds a finished row is replayed; 0 is never. ``otlp_endpoint`` is where
    traces are sent, by OTLP over HTTP; None makes none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_body_bytes: int = 16 << 20
    keep_alive_seconds: float = 15.0
    grace_seconds: float = 10.0
    log_format: LogFormat = "text"
    canary_interval: float = 0.0
    otlp_endpoint: str | None = None
