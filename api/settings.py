"""The HTTP server's settings. The command line is a thin layer that builds this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chairlift.api.admission.keys import NO_LIMITS, ApiKey, KeyLimits
from chairlift.api.text.chat_format import ThinkTags
from chairlift.engine.logs.setup import LogFormat
from chairlift.scheduler.sequence import Pooling


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the model is offered over HTTP.

    ``served_model_name`` None is the model's own name. ``embedding_pooling`` is what makes one
    vector of a text's, where a request does not say. ``keep_alive_seconds`` is the longest a
    stream stays silent before a comment line is sent. ``log_format`` is "text" or "json". Every
    ``canary_interval`` seconds a finished row is replayed; 0 is never. ``otlp_endpoint`` is where
    traces are sent, by OTLP over HTTP; None makes none. ``tool_parser`` and ``think_tags`` None:
    what goes with the model's tokenizer.

    ``keys`` empty: anybody may come, and all of them share ``anonymous``. Those are also the limits
    of keys that have none of their own. ``api_key_file`` is where keys are read again.
    ``ssl_keyfile`` None: the key is in ``ssl_certfile``; that None: no TLS. ``cors_origins`` are
    those of web pages that may come. ``response_store_bytes`` are the most that stored responses
    may take, and ``response_store_seconds`` how long each is kept. ``ui``: a page at /.
    ``metrics_port`` None: /metrics is on ``port`` with the rest.

    Seconds: ``drain_seconds`` is how long requests may go on once the server was asked to stop,
    ``request_seconds`` how long one may take at all (None: as long as it does), ``idle_seconds``
    how long a connection may be silent between requests, or take for a request's headers,
    ``body_seconds`` how long a body may take, ``slow_reader_seconds`` how long a client may leave
    unread what was sent. ``slow_reader_tokens`` are the most that wait for it meanwhile.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_body_bytes: int = 16 << 20
    embedding_pooling: Pooling = "mean"
    keep_alive_seconds: float = 15.0
    log_format: LogFormat = "text"
    canary_interval: float = 0.0
    otlp_endpoint: str | None = None
    tool_parser: str | None = None
    think_tags: ThinkTags | None = None
    keys: tuple[ApiKey, ...] = ()
    api_key_file: Path | None = None
    anonymous: KeyLimits = NO_LIMITS
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    cors_origins: tuple[str, ...] = ()
    response_store_bytes: int = 64 << 20
    response_store_seconds: float = 3600.0
    ui: bool = True
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    drain_seconds: float = 30.0
    request_seconds: float | None = None
    idle_seconds: float = 75.0
    body_seconds: float = 60.0
    slow_reader_seconds: float = 30.0
    slow_reader_tokens: int = 16384
