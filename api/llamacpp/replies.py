"""The reply bodies of llama.cpp's routes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class LlamaDefaults(Struct):
    """``n_ctx`` is the maximum length of a request, prompt and output, in tokens."""

    n_ctx: int


class LlamaModalities(Struct):
    vision: bool = False
    audio: bool = False


class LlamaProps(Struct):
    """The server's properties. ``total_slots`` is the number of rows that run at a time."""

    default_generation_settings: LlamaDefaults
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    modalities: LlamaModalities
    is_sleeping: bool = False


class LlamaSlot(Struct):
    """A row. ``id_task`` is the number of its request among those that run, or -1."""

    id: int
    id_task: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False


class LlamaPrompt(Struct):
    prompt: str


class LlamaTimings(Struct):
    """Durations in milliseconds. ``cache_n`` prompt tokens came from the prefix cache."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class LlamaInfillPiece(Struct):
    """A piece of a streamed /infill reply."""

    content: str
    index: int = 0
    stop: bool = False


class LlamaInfill(Struct):
    """The whole reply of /infill, or the end of its stream, whose content is empty."""

    content: str
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    timings: LlamaTimings
    truncated: bool = False
    index: int = 0
    stop: bool = True
