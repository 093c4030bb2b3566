"""The flags of ``serve`` for LoRA adapters."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from chairlift.api.cli.flags import directory, lora, positive
from chairlift.api.settings import LoraSource
from chairlift.engine.config import EngineConfig

_ENGINE = EngineConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "LoRA adapters"."""
    add = parser.add_argument_group("LoRA adapters").add_argument
    add(
        "--lora",
        action="append",
        type=lora,
        default=[],
        metavar="NAME=PATH",
        help="serve this adapter (mlx-lm's or PEFT's folder) under this name; may be repeated "
        "(default: none)",
    )
    add(
        "--lora-dir",
        type=directory,
        metavar="DIR",
        help="let requests load adapters from below this folder, by /v1/load_lora_adapter "
        "(default: requests cannot load any)",
    )
    add(
        "--max-loras",
        type=positive,
        default=_ENGINE.max_loras,
        metavar="N",
        help="loaded adapters at most (default: %(default)s)",
    )
    add(
        "--max-lora-rank",
        type=positive,
        default=_ENGINE.max_lora_rank,
        metavar="N",
        help="the largest rank of an adapter (default: %(default)s)",
    )


def adapter_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``ServerSettings`` for LoRA adapters.

    Raises:
        ValueError: there are too many adapters, or two of one name.
    """
    loras = [LoraSource(*adapter.split("=", 1)) for adapter in options.lora]
    names = [adapter.name for adapter in loras]
    if len(set(names)) < len(names):
        raise ValueError("--lora: two adapters have the same name")
    if len(loras) > options.max_loras:
        raise ValueError(f"--lora: {len(loras)} adapters, but --max-loras is {options.max_loras}")
    loras = [LoraSource(name, Path(path).expanduser().absolute()) for name, path in loras]
    return {"loras": tuple(loras), "lora_dir": options.lora_dir}
