"""The flags of ``serve`` for the model and how it is loaded."""

from __future__ import annotations

import argparse
import json
from typing import Any

from chairlift.api.cli.arguments.config_sources import TablesAction
from chairlift.api.cli.flags import (
    generation_config,
    json_object,
    positive_seconds,
    served_name,
)
from chairlift.api.models.spec import LOADS
from chairlift.engine.config import DEFAULT_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the positional models and the group "Model"."""
    _add_models(parser)
    group = parser.add_argument_group("Model")
    _add_loading(group)
    _add_default_sampling(group)


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a hub id, org/name:file.gguf or org/name:Q4_K_M of the hub, an mlx-lm or HF "
        "directory, or a .gguf file "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "models",
        action=TablesAction,
        nargs="*",
        metavar="MODEL",
        default=[],
        help="further models behind the same server, each with an engine of its own; in a file, "
        "[[models]] tables give each its own flags (default: none)",
    )


def _add_loading(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a hub model (default: its main branch)",
    )
    add(
        "--served-model-name",
        type=served_name,
        metavar="NAME",
        help="the model's id in the API (default: its own)",
    )
    add(
        "--alias",
        action="append",
        type=served_name,
        default=[],
        metavar="NAME",
        help="a further id of the model in the API; may be repeated (default: none)",
    )
    add(
        "--load",
        choices=LOADS,
        default=LOADS[0],
        help="load the model at the start, or (lazy) when the first request names it "
        "(default: %(default)s)",
    )
    add(
        "--keep-alive",
        type=positive_seconds,
        metavar="S",
        help="unload a model after this many seconds without a request; the next request loads it "
        "again (default: it stays loaded)",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="data type of weights and activations; auto is float32 on the CPU and the model's own "
        "elsewhere (default: auto). With compiled kernels, auto rounds weights of a quantized "
        "file that it does not keep quantized to bfloat16, with AMX all of small models, and keys "
        "and values of 16-bit models to float16",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the model",
    )
    add(
        "--text-only",
        action="store_true",
        help="serve only the text part of a vision model",
    )


def _add_default_sampling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--generation-config",
        type=generation_config,
        default="auto",
        metavar="auto|none|PATH",
        help="where requests' default sampling comes from: auto is the model's own "
        "generation_config.json or GGUF metadata, none (or vllm) is temperature 1 without filters, "
        "PATH is another generation_config.json or its folder (default: %(default)s)",
    )
    add(
        "--override-generation-config",
        type=json_object,
        metavar="JSON",
        help="values that replace those of the generation config, like '{\"temperature\": 0.5}': "
        "temperature, top_p, top_k, min_p, repetition_penalty, eos_token_id (default: none)",
    )


def generation_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``ServerSettings`` for the generation config.

    Raises:
        ValueError: --override-generation-config has an unknown key, or a value out of range.
    """
    override = json.loads(options.override_generation_config or "{}")
    if override:
        # Imports pydantic, which takes a tenth of a second.
        from chairlift.api.schemas.sampling_defaults import check_override

        check_override(override)
    return {
        "generation_config": options.generation_config,
        "override_generation_config": override,
    }
