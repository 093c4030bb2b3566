"""Loads the fast BLAS before any test imports MLX, and drops the user's own API key."""

from __future__ import annotations

import gc
import os

from chairlift.engine.cpu.blas import load_fast_blas

# With MLX's own BLAS on Linux the suite would take an hour.
load_fast_blas()

# Servers in the tests would require it of clients.
os.environ.pop("OPENAI_API_KEY", None)


def pytest_collection_finish() -> None:
    """Excludes the imported modules from all later collections of garbage."""
    gc.collect()
    gc.freeze()
