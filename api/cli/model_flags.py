"""The flags of ``serve`` for the model and how it is loaded."""

from __future__ import annotations

import argparse

from chairlift.engine.config import DEFAULT_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the positional model and the group "Model"."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a hub id, an mlx-lm or HF directory, or a .gguf file (default: %(default)s)",
    )
    add = parser.add_argument_group("Model").add_argument
    add(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a hub model (default: its main branch)",
    )
    add("--served-model-name", metavar="NAME", help="the model's id in the API (default: its own)")
    add(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="data type of weights and activations; auto is float32 on the CPU (with bfloat16 "
        "matrix units, quantized weights are rounded to bfloat16) and the model's own elsewhere "
        "(default: auto)",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the model",
    )
