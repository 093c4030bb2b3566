"""``python -m chairlift.loadtest.convert MODEL``: converts a model to a folder for mlx_lm.server.

It prints the folder, which stays in the user's cache and is converted only once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from chairlift.engine.config import cache_dir
from chairlift.engine.cpu.blas import load_fast_blas
from chairlift.engine.errors import ChairliftError

# Increase when the folder's content changes, so that old folders are not used.
_FORMAT = 1

# Files in which a Hugging Face model names its end-of-text token.
_EOS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def convert(model: str) -> Path:
    """Converts a model to Chairlift's data types, without an end-of-text token; returns the folder.

    mlx_lm.server has no ignore_eos. Without an end-of-text token, every reply runs to full length
    at no cost in the step.

    Raises:
        ModelError: the model cannot be loaded.
    """
    load_fast_blas()  # before anything imports mlx
    from mlx_lm.utils import save_config, save_model

    from chairlift.engine.hub.source import resolve
    from chairlift.engine.model.loader import load_model
    from chairlift.engine.model.text.tokenizer import load_tokenizer

    source = resolve(model)
    path = Path(source.path)
    stat = path.stat()
    identity = f"{path.stem}-{stat.st_size}-{int(stat.st_mtime)}-v{_FORMAT}"
    folder = cache_dir() / "compare" / identity
    if folder.exists():
        return folder
    print(f"converting {path} for mlx_lm.server", file=sys.stderr, flush=True)
    # Write to a temporary folder and rename it, so that an interrupted conversion is never used.
    partial = folder.with_name(f"{identity}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        loaded = load_model(source, "auto")
        save_model(partial, loaded.model)
        config: dict[str, Any] = {k: v for k, v in loaded.config.items() if "eos_token" not in k}
        save_config(config, partial / "config.json")
        load_tokenizer(source).save_pretrained(partial)
        for name in _EOS_FILES:
            _forget_eos(partial / name)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _forget_eos(path: Path) -> None:
    if path.exists():
        values = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: value for key, value in values.items() if not key.startswith("eos_token")}
        path.write_text(json.dumps(kept), encoding="utf-8")


def main() -> int:
    """Returns the exit code; prints an error of the model to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m chairlift.loadtest.convert", description=__doc__
    )
    parser.add_argument("model", help="a GGUF file, a directory, a hub id or the default's name")
    options = parser.parse_args()
    try:
        print(convert(options.model))
    except ChairliftError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
