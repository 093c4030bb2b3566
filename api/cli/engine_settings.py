"""The engine's settings from the flags of ``serve``."""

from __future__ import annotations

import argparse

from chairlift.engine.config import EngineConfig
from chairlift.engine.messages.speculative_config import (
    DEFAULT_TOKENS,
    MAX_TOKENS,
    SpeculativeConfig,
    parse_config,
)

_ENGINE = EngineConfig()


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's settings from the flags of ``serve``.

    Raises:
        ValueError: a flag is given without another that it needs; the message names both.
    """
    dir_bytes, group_size = options.prefix_cache_dir_bytes, options.kv_group_size
    if dir_bytes is not None and options.prefix_cache_dir is None:
        raise ValueError("--prefix-cache-dir-bytes needs --prefix-cache-dir")
    swap_dir_bytes = options.swap_dir_bytes
    if swap_dir_bytes is not None and options.swap_dir is None:
        raise ValueError("--swap-dir-bytes needs --swap-dir")
    if group_size is not None and options.kv_bits is None:
        raise ValueError("--kv-group-size needs --kv-bits")
    if options.gpu_memory_utilization is not None and options.kv_memory is not None:
        raise ValueError("--gpu-memory-utilization and --kv-memory exclude each other; give one")
    config = EngineConfig(
        model=options.model,
        revision=options.revision,
        memory_share=options.gpu_memory_utilization,
        dtype=options.dtype,
        threads=options.threads,
        max_rows=options.max_rows,
        max_step_tokens=options.max_step_tokens,
        max_step_ms=options.max_step_ms,
        kv_memory=options.kv_memory,
        max_queue=options.max_queue,
        max_context=options.max_context,
        priority_ageing=options.priority_ageing,
        prefill_slack=options.prefill_slack,
        text_only=options.text_only,
        trust_remote_code=options.trust_remote_code,
        prefix_cache_bytes=options.prefix_cache_bytes,
        prefix_cache_dir=options.prefix_cache_dir,
        prefix_cache_dir_bytes=_ENGINE.prefix_cache_dir_bytes if dir_bytes is None else dir_bytes,
        swap_memory=options.swap_memory,
        swap_dir=options.swap_dir,
        swap_dir_bytes=_ENGINE.swap_dir_bytes if swap_dir_bytes is None else swap_dir_bytes,
        kv_bits=options.kv_bits,
        replicas=options.replicas or len(options.devices) or 1,
        devices=tuple(options.devices) or None,
        tensor_parallel_size=options.tensor_parallel_size,
        hostfile=options.hostfile,
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
        speculative=_speculative(options),
        kv_group_size=_ENGINE.kv_group_size if group_size is None else group_size,
    )
    if not config.takes_adapters and (options.lora or options.lora_dir is not None):
        raise ValueError(
            "--lora and --lora-dir do not work with --replicas or --tensor-parallel-size above 1"
        )
    return config


def _speculative(options: argparse.Namespace) -> SpeculativeConfig | None:
    """How tokens are proposed.

    Raises:
        ValueError: flags exclude each other, or one needs another, or a number is out of range.
    """
    text, model, tokens = options.speculative_config, options.draft_model, options.num_draft_tokens
    if model is None:
        if tokens is not None:
            raise ValueError("--num-draft-tokens needs --draft-model")
        return None if text is None else parse_config(text)
    if text is not None:
        raise ValueError("--draft-model and --speculative-config exclude each other; give one")
    tokens = DEFAULT_TOKENS if tokens is None else tokens
    if tokens > MAX_TOKENS:
        raise ValueError(f"--num-draft-tokens must be 1 to {MAX_TOKENS}, not {tokens}")
    return SpeculativeConfig("draft_model", model, tokens)
