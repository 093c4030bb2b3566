"""The flags of ``python -m chairlift.loadtest.engine_bench``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.cli.flags import positive, share, whole
from chairlift.engine.config import KV_BITS
from chairlift.loadtest.bench.files import output_file
from chairlift.loadtest.engine_bench.load import Range, lengths


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def engine_parser(
    description: str, shapes: Iterable[str], dtypes: Iterable[str]
) -> argparse.ArgumentParser:
    """The parser of the flags; ``shapes`` and ``dtypes`` are the names of both."""
    parser = CommandParser(prog="engine_bench", description=description)
    _add_model(parser, shapes, dtypes)
    _add_decode_steps(parser)
    _add_device(parser)
    parser.add_argument(
        "--server",
        action="store_true",
        help="measure only the mixed load, through a server of the same model and over HTTP",
    )
    parser.add_argument("--out", type=output_file, metavar="FILE", help="write all figures as JSON")
    _add_mixed_load(parser)
    return parser


def _add_model(
    parser: argparse.ArgumentParser, shapes: Iterable[str], dtypes: Iterable[str]
) -> None:
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
        "--bits",
        type=int,
        choices=(4, 8),
        help="quantize the weights, in groups of 64 (default: no)",
    )
    parser.add_argument(
        "--rows", type=positive, default=256, help="rows of the batch (default: %(default)s)"
    )
    parser.add_argument(
        "--kv-gb",
        type=_above_zero,
        help="memory for the KV cache in GB, on each device (default: what a server would take)",
    )
    parser.add_argument(
        "--kv-bits",
        type=int,
        choices=KV_BITS,
        help="quantize our keys and values, in groups of 64 (default: no)",
    )


def _add_decode_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--decode",
        type=positive,
        nargs="*",
        default=[1, 32, 64, 256],
        help="numbers of rows for which decode steps are measured (default: 1 32 64 256)",
    )
    parser.add_argument("--context", type=positive, default=512, help="prompt tokens of --decode")
    parser.add_argument(
        "--timeline",
        type=positive,
        nargs="*",
        default=[],
        help="values of --decode to record a second",
    )
    parser.add_argument(
        "--adapters",
        type=whole,
        default=0,
        metavar="N",
        help="also compare decode steps of --decode with and without N LoRA adapters of rank 8, "
        "step by step in turn (default: %(default)s)",
    )
    parser.add_argument(
        "--speculative",
        type=share,
        metavar="P",
        help="also compare the tokens a second of --decode with and without speculative decoding, "
        "by proposals each of whose tokens is right with probability P",
    )
    parser.add_argument(
        "--only",
        choices=("ours", "mlx-lm"),
        help="measure one engine; mlx-lm alone computes the model as it is, and not with our "
        "products and layers (default: both)",
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="divide the model among N devices of this machine (default: %(default)s)",
    )
    parser.add_argument(
        "--bandwidth",
        type=_above_zero,
        default=4.8e12,
        help="the device's memory bandwidth in bytes per second (default: an H200's)",
    )
    parser.add_argument(
        "--flops",
        type=_above_zero,
        default=989e12,
        help="the device's arithmetic in operations per second (default: an H200's)",
    )


def _add_mixed_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Mixed load").add_argument
    add(
        "--max-step-ms",
        type=positive,
        metavar="MS",
        help="milliseconds of our steps while rows are decoding (default: the device's)",
    )
    add("--requests", type=whole, default=256, help="requests, 0 for none (default: %(default)s)")
    add(
        "--prompt-tokens",
        type=lengths,
        default=Range(256, 768),
        metavar="LENGTHS",
        help="tokens of a prompt: LOW:HIGH or lognormal:MEDIAN:SIGMA:MAX (default: 256:768)",
    )
    add(
        "--output-tokens",
        type=lengths,
        default=Range(128, 384),
        metavar="LENGTHS",
        help="tokens of a reply, in the same forms (default: 128:384)",
    )
    add(
        "--rate",
        type=_above_zero,
        metavar="R",
        help="requests a second, as a Poisson process (default: all at once)",
    )
    add(
        "--max-concurrency",
        type=positive,
        metavar="N",
        help="with --server, requests in flight at most (default: no limit)",
    )
    add("--seed", type=int, default=0, help="seed of lengths and arrivals (default: %(default)s)")
