"""The flags of ``python -m chairlift.loadtest.engine_bench``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from chairlift.api.cli.arguments.parser import CommandParser


def _int_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def engine_parser(
    description: str, shapes: Iterable[str], dtypes: Iterable[str]
) -> argparse.ArgumentParser:
    """The parser of the flags; ``shapes`` and ``dtypes`` are the names of both."""
    parser = CommandParser(prog="engine_bench", description=description)
    parser.add_argument(
        "--model",
        default="qwen3-8b",
        help=f"the shapes: {', '.join(shapes)}, or a config.json (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(dtypes),
        default="bfloat16",
        help="type of the weights (default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=256,
        help="requests of the mixed load, 0 for none (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_int_range,
        default=(256, 768),
        help="tokens of a prompt of the mixed load, from a range (default: 256:768)",
    )
    parser.add_argument(
        "--output-tokens",
        type=_int_range,
        default=(128, 384),
        help="tokens of a reply of the mixed load, from a range (default: 128:384)",
    )
    parser.add_argument(
        "--rows", type=int, default=256, help="rows of the batch (default: %(default)s)"
    )
    parser.add_argument(
        "--kv-gb",
        type=float,
        default=60.0,
        help="memory for the KV cache in GB, on each device (default: %(default)s)",
    )
    parser.add_argument(
        "--decode",
        type=int,
        nargs="*",
        default=[1, 32, 64, 256],
        help="numbers of rows for which decode steps are measured (default: 1 32 64 256)",
    )
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of --decode")
    parser.add_argument(
        "--timeline", type=int, nargs="*", default=[], help="values of --decode to record a second"
    )
    parser.add_argument(
        "--adapters",
        type=int,
        default=0,
        metavar="N",
        help="also compare decode steps of --decode with and without N LoRA adapters of rank 8, "
        "step by step in turn (default: %(default)s)",
    )
    parser.add_argument(
        "--only", choices=("ours", "mlx-lm"), help="measure one engine (default: both)"
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="divide the model among N devices of this machine (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the mixed load's lengths (default: %(default)s)",
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=4.8e12,
        help="the device's memory bandwidth in bytes per second (default: an H200's)",
    )
    parser.add_argument(
        "--flops",
        type=float,
        default=989e12,
        help="the device's arithmetic in operations per second (default: an H200's)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    return parser
