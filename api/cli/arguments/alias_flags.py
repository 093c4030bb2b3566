"""The names that vLLM and mlx-lm use for flags of ``serve``."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from chairlift.api.cli.arguments.aliases import AliasAction
from chairlift.api.cli.arguments.list_types import origins
from chairlift.api.cli.arguments.parser_names import TOOL_PARSERS, reasoning_tags, tool_parser
from chairlift.api.cli.flags import byte_size_or_zero, lora, positive, token_count

_KV_DTYPES = {"auto": None, "int8": 8, "q8_0": 8, "int4": 4, "q4_0": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "Names of vLLM and mlx-lm"."""
    group = parser.add_argument_group("Names of vLLM and mlx-lm")
    add = partial(group.add_argument, action=AliasAction)
    add(
        "--model",
        dest="model_flag",
        of="model",
        is_flag_only=True,
        metavar="MODEL",
        help="the model, as the first argument names it",
    )
    for name, of, type, metavar in (
        ("--max-model-len", "max-context", token_count, "N"),
        ("--max-num-seqs", "max-rows", positive, "N"),
        ("--decode-concurrency", "max-rows", positive, "N"),
        ("--max-num-batched-tokens", "max-step-tokens", token_count, "N"),
        ("--data-parallel-size", "replicas", positive, "N"),
        ("--prompt-cache-bytes", "prefix-cache-bytes", byte_size_or_zero, "SIZE"),
    ):
        add(name, of=of, type=type, metavar=metavar, help=f"the same as --{of}")
    add(
        "--enable-prefix-caching",
        of="prefix-cache-bytes",
        is_switch=True,
        translate=_prefix_cache_bytes,
        agrees=_both_on_or_off,
        help="--no-enable-prefix-caching is --prefix-cache-bytes 0 (default: enabled)",
    )
    add(
        "--kv-cache-dtype",
        of="kv-bits",
        type=_kv_dtype,
        translate=_KV_DTYPES.__getitem__,
        metavar="TYPE",
        help="auto: the type of the activations; int8 or q8_0: --kv-bits 8; int4 or q4_0: "
        "--kv-bits 4",
    )
    add(
        "--lora-modules",
        of="lora",
        type=_lora_module,
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="the same as --lora, for one adapter or several, also as JSON with name and path",
    )
    add(
        "--enable-lora",
        of=None,
        is_switch=True,
        help="accepted without effect: adapters need no switch",
    )
    _add_output(add)


def _add_output(add: Any) -> None:
    add(
        "--tool-call-parser",
        of="tool-parser",
        type=tool_parser,
        metavar="NAME",
        help=f"--tool-parser by vLLM's names: {', '.join(TOOL_PARSERS)}, or a name that "
        "--tool-parser takes",
    )
    add(
        "--reasoning-parser",
        of="think-tags",
        type=reasoning_tags,
        metavar="NAME",
        help="--think-tags by the names of vLLM's parsers, like deepseek_r1, qwen3 or mistral",
    )
    add(
        "--enable-auto-tool-choice",
        of=None,
        is_switch=True,
        help="accepted without effect: models may always choose tools",
    )
    add(
        "--allowed-origins",
        of="cors-origin",
        type=origins,
        metavar="ORIGINS",
        help="the same as --cors-origin: a JSON list, or a list with commas; may be repeated",
    )


def _prefix_cache_bytes(enabled: bool) -> int | None:
    return None if enabled else 0


def _both_on_or_off(one: int | None, other: int | None) -> bool:
    return (one == 0) == (other == 0)


def _lora_module(text: str) -> str:
    """Parses NAME=PATH, or a JSON object like {"name": …, "path": …}."""
    if not text.lstrip().startswith("{"):
        return lora(text)
    try:
        module = json.loads(text)
        return lora(f"{module['name']}={module['path']}")
    except (ValueError, RecursionError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} has no name and path") from error


def _kv_dtype(text: str) -> str:
    if text not in _KV_DTYPES:
        raise argparse.ArgumentTypeError(
            f"the KV cache cannot have the type {text!r}; it takes {', '.join(_KV_DTYPES)}"
        )
    return text
