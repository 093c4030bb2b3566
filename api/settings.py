"""The HTTP server's settings. The command line is a thin layer that builds this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chairlift.api.admission.keys import NO_LIMITS, ApiKey, KeyLimits
from chairlift.api.text.chat_format import ThinkTags
from chairlift.engine.logs.setup import LogFormat
from chairlift.engine.messages import Pooling


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the model is offered over HTTP.

    Model: ``served_model_name`` None means the model's own name. ``embedding_pooling`` is the
    default for requests that name no pooling. ``tool_parser`` and ``think_tags`` None mean those
    of the model's tokenizer.

    Access: without ``keys`` everybody may send requests and all share the limits ``anonymous``,
    which are also the default limits of keys. ``api_key_file`` is read again on reload.
    ``ssl_certfile`` None disables TLS; ``ssl_keyfile`` None means the key is in ``ssl_certfile``.
    ``cors_origins`` are the origins of web pages that may call the server.

    Limits: stored responses take at most ``response_store_bytes`` and are kept for
    ``response_store_seconds``. ``drain_seconds`` is the time that running requests get when the
    server stops, ``request_seconds`` each request's time limit (None: unlimited),
    ``idle_seconds`` the time that a connection may be silent between requests or take to send a
    request's headers, ``body_seconds`` the time for a body. A client that leaves sent data unread
    for ``slow_reader_seconds``, or lets more than ``slow_reader_tokens`` outputs wait, is cut off.

    Observability: a stream that is silent for ``keep_alive_seconds`` gets a keep-alive.
    ``log_format`` is "text" or "json". Every ``canary_interval`` seconds a finished row is
    replayed; 0 disables that. ``otlp_endpoint`` receives traces by OTLP over HTTP; None disables
    them. ``ui`` serves the page at /. ``metrics_port`` None serves /metrics on ``port``.
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
