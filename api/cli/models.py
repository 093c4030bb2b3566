"""``chairlift models``: lists the models on disk."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.engine.hub.inventory import StoredModel

_HEADS = ("NAME", "ARCHITECTURE", "SIZE", "WHERE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``models``."""
    parser.description = (
        "Lists the models in the cache folders of Chairlift and of the Hugging Face hub, with the "
        "names to give to 'chairlift serve'."
    )
    parser.add_argument(
        "folders",
        nargs="*",
        type=_folder,
        metavar="DIR",
        help="also look for .gguf files and model directories below these",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array; sizes in bytes")


def run(options: argparse.Namespace) -> int:
    """Prints the list, which may be empty; returns 0."""
    from chairlift.engine.hub.inventory import stored_models

    models = stored_models(options.folders)
    if options.json:
        print(json.dumps([asdict(model) for model in models], default=str, indent=2))
    elif models:
        print(_table(models))
    else:
        print("no model on disk: 'chairlift fetch' downloads one, and so does 'chairlift serve'")
    return 0


def _table(models: Sequence[StoredModel]) -> str:
    rows = [_HEADS]
    rows += [
        (model.name, model.architecture, _size(model.size), str(model.path)) for model in models
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory")
    return path
