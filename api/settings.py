"""The HTTP server's settings. The command line is a thin layer that builds this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.api.admission.keys import NO_LIMITS, ApiKey, KeyLimits
from chairlift.api.text.chat_format import ThinkTags
from chairlift.engine.logs.setup import LogFormat
from chairlift.engine.messages import Pooling


class LoraSource(NamedTuple):
    """An adapter's name in the API, and the folder of its files."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of the API process. Times are in seconds.

    Attributes:
        host: the address to listen on.
        port: the port to listen on; 0 picks a free one.
        served_model_name: the model's id in the API; None means the model's own name.
        loras: the LoRA adapters that are loaded at the start.
        lora_dir: requests may load adapters from below this folder; None forbids that.
        generation_config: the source of the default sampling: "auto" is the model, "none" nothing,
            and else it is the path of a generation_config.json or its folder.
        override_generation_config: values that replace those of the generation config.
        max_body_bytes: the maximum size of a request body.
        embedding_pooling: the default for requests that name no pooling.
        keep_alive_seconds: a stream that is silent for so long gets a keep-alive.
        log_format: "text" or "json".
        canary_interval: the time between two replays of finished rows; 0 disables them.
        otlp_endpoint: receives traces by OTLP over HTTP; None disables them.
        tool_parser: the parser of tool calls; None means that of the model's tokenizer.
        chat_template: the text of the chat template; None means the model's own.
        seed: starts the sequence of seeds of requests that give none; None takes a random one.
        think_tags: the tags around reasoning; None means those of the model's tokenizer.
        keys: the API keys; without any, everybody may send requests.
        given_keys: those of ``keys`` that are in no file.
        api_key_file: the file of the keys, read again on reload.
        anonymous: the limits that all clients share if there are no keys. They are also the default
            limits of each key.
        ssl_certfile: the certificate; None disables TLS.
        ssl_keyfile: the certificate's key; None means that it is in ``ssl_certfile``.
        cors_origins: the origins of web pages that may call the server.
        response_store_bytes: the maximum memory for stored responses; 0 stores none.
        response_store_seconds: the time for which a response is stored.
        file_dir: the folder of files and batches; None means a folder in the user's data.
        file_dir_bytes: the maximum size of all uploaded files together; 0 keeps none.
        max_file_bytes: the maximum size of an uploaded file.
        max_files: the maximum number of files.
        max_batch_requests: the maximum number of requests of a batch.
        batch_concurrency: the choices that all batches generate at the same time; None means half
            of the rows.
        allowed_media_domains: the hosts that images are fetched from.
        allowed_local_media_path: the folder that images are read from; None: from none.
        ui: whether the page at / is served.
        metrics_host: the address of ``metrics_port``.
        metrics_port: a separate port for /metrics; None serves it on ``port``.
        drain_seconds: the time that running requests get when the server stops.
        request_seconds: each request's time limit; None means unlimited.
        idle_seconds: the time for which a connection may be silent between two requests, or take
            to send a request's headers.
        body_seconds: the time for sending a request body.
        slow_reader_seconds: a client that leaves sent data unread for so long is disconnected.
        slow_reader_tokens: a client is disconnected if more outputs than this wait for it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    loras: tuple[LoraSource, ...] = ()
    lora_dir: Path | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    max_body_bytes: int = 16 << 20
    embedding_pooling: Pooling = "mean"
    keep_alive_seconds: float = 15.0
    log_format: LogFormat = "text"
    canary_interval: float = 0.0
    otlp_endpoint: str | None = None
    tool_parser: str | None = None
    chat_template: str | None = None
    seed: int | None = None
    think_tags: ThinkTags | None = None
    keys: tuple[ApiKey, ...] = ()
    given_keys: tuple[ApiKey, ...] = ()
    api_key_file: Path | None = None
    anonymous: KeyLimits = NO_LIMITS
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    cors_origins: tuple[str, ...] = ()
    response_store_bytes: int = 64 << 20
    response_store_seconds: float = 3600.0
    file_dir: Path | None = None
    file_dir_bytes: int = 10 << 30
    max_file_bytes: int = 200 << 20
    max_files: int = 10_000
    max_batch_requests: int = 50_000
    batch_concurrency: int | None = None
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: Path | None = None
    ui: bool = True
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    drain_seconds: float = 30.0
    request_seconds: float | None = None
    idle_seconds: float = 75.0
    body_seconds: float = 60.0
    slow_reader_seconds: float = 30.0
    slow_reader_tokens: int = 16384
