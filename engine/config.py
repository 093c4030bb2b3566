"""The engine's settings. The command line is a thin layer that builds this."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine serves one model.

    ``model`` is DEFAULT_MODEL, a hub id, an mlx-lm or Hugging Face directory, or a ``.gguf`` file.
    ``dtype`` is "auto", "float32", "float16" or "bfloat16"; auto means float32 on the CPU and the
    model's own type elsewhere. ``max_step_tokens`` bounds the prompt and decode tokens computed in
    one step; None chooses by device. ``kv_memory`` is in bytes; None takes a share of what the
    machine has left once the weights are loaded. ``max_context`` None is the model's own limit.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    max_rows: int | None = None
    max_step_tokens: int | None = None
    kv_memory: int | None = None
    max_queue: int = 256
    max_context: int | None = None
    trust_remote_code: bool = False
