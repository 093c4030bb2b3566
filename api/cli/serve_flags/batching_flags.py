"""The flags of ``serve`` for batches, KV cache, prefix cache and swap."""

from __future__ import annotations

import argparse

from chairlift.api.cli.arguments.device_values import by_device
from chairlift.api.cli.flags import (
    byte_size,
    byte_size_or_zero,
    directory,
    factor,
    positive,
    positive_seconds,
    share,
    speculative_config,
)
from chairlift.engine.config import KV_BITS, KV_GROUP_SIZES, EngineConfig
from chairlift.engine.messages.speculative_config import DEFAULT_TOKENS

_DEFAULTS = EngineConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "Batching and memory"."""
    group = parser.add_argument_group("Batching and memory")
    _add_batching(group)
    _add_kv_cache(group)
    _add_prefix_cache(group)
    _add_swap(group)
    _add_speculation(group)


def _add_batching(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="CPU threads for matrix products (default: one per core, fewer while other processes "
        "want the cores)",
    )
    add(
        "--max-rows",
        type=positive,
        metavar="N",
        help=f"maximum number of sequences in one batch (default: {by_device('max-rows')})",
    )
    add(
        "--max-step-tokens",
        type=positive,
        metavar="N",
        help="maximum tokens computed in one step (default: grows with --max-rows; "
        f"{by_device('max-step-tokens')})",
    )
    add(
        "--max-step-ms",
        type=positive,
        metavar="MS",
        help="target duration of a step while streams are running; prompts are cut into chunks "
        f"that fit (default: {by_device('max-step-ms')})",
    )
    add(
        "--priority-ageing",
        type=positive_seconds,
        default=_DEFAULTS.priority_ageing,
        metavar="S",
        help="a request that has waited this much longer goes before one of the next more urgent "
        "priority class (default: %(default)g)",
    )
    add(
        "--prefill-slack",
        type=factor,
        default=_DEFAULTS.prefill_slack,
        metavar="N",
        help="prompts may overtake a longer one if they come within N times the time that it takes "
        "alone; 0: first come, first served (default: %(default)g)",
    )


def _add_kv_cache(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--kv-memory",
        type=byte_size,
        metavar="SIZE",
        help="memory for the KV cache: bytes, like 4G or 512M (default: together with the prefix "
        f"cache a share of what is free once the model is loaded, {by_device('kv-memory')})",
    )
    add(
        "--gpu-memory-utilization",
        type=share,
        metavar="SHARE",
        help="share of the device's memory (without a GPU: the machine's) for weights, KV cache, "
        "prefix cache and a step together, like 0.9; instead of --kv-memory (default: a share of "
        "what is free once the weights are loaded)",
    )
    add(
        "--kv-bits",
        type=int,
        choices=KV_BITS,
        help="quantize the KV cache to this many bits per value (default: not quantized)",
    )
    add(
        "--kv-group-size",
        type=int,
        choices=KV_GROUP_SIZES,
        help=f"values that share one scale with --kv-bits (default: {_DEFAULTS.kv_group_size})",
    )


def _add_prefix_cache(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prefix-cache-bytes",
        type=byte_size_or_zero,
        metavar="SIZE",
        help="memory for the KV of earlier prompts, which later prompts with the same beginning "
        "reuse: bytes, like 4G or 512M; 0 turns it off (default: a quarter of both caches' memory; "
        "with --kv-memory a third of that, on top of it)",
    )
    add(
        "--prefix-cache-dir",
        type=directory,
        metavar="DIR",
        help="also store prefixes in this directory, so that they survive a restart "
        "(default: in memory only)",
    )
    add(
        "--prefix-cache-dir-bytes",
        type=byte_size,
        metavar="SIZE",
        help="maximum size of --prefix-cache-dir: bytes, like 4G or 512M (default: 10G)",
    )


def _add_swap(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--swap-memory",
        type=byte_size_or_zero,
        metavar="SIZE",
        help="host memory for the KV of preempted sequences, which then continue without being "
        "computed again: bytes, like 4G or 512M; 0 recomputes them (default: 4G, or an eighth of "
        "free memory if that is less)",
    )
    add(
        "--swap-dir",
        type=directory,
        metavar="DIR",
        help="when half of --swap-memory is full, move some of it to unnamed files in this "
        "directory (default: in memory only)",
    )
    add(
        "--swap-dir-bytes",
        type=byte_size,
        metavar="SIZE",
        help="maximum size of --swap-dir: bytes, like 4G or 512M (default: 10G)",
    )


def _add_speculation(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--speculative-config",
        type=speculative_config,
        metavar="JSON",
        help="propose tokens of every request and verify several in one step, like "
        '\'{"method": "ngram", "num_speculative_tokens": 8}\', with vLLM\'s keys: method (ngram '
        "or draft_model), model, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min "
        "(default: only what grammars force and requests predict)",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="propose tokens by a smaller model of the same vocabulary, a hub id, a directory or a "
        ".gguf file; short for --speculative-config with the method draft_model (default: none)",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=positive,
        metavar="N",
        help="maximum tokens that --draft-model proposes of a row at a time "
        f"(default: {DEFAULT_TOKENS})",
    )
