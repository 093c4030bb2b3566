"""Where Chairlift keeps on disk what it can make again: models, tokenizers, linked libraries."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The folder for all that Chairlift can make again: $CHAIRLIFT_CACHE, or the user's cache."""
    if chosen := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "chairlift"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chairlift"
