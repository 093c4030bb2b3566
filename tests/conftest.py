"""Loads the fast BLAS before any test imports MLX, and makes garbage collections cheap."""

from __future__ import annotations

import gc

from chairlift.engine.cpu.blas import load_fast_blas

# With MLX's own BLAS on Linux the suite would take an hour.
load_fast_blas()


def pytest_collection_finish() -> None:
    """Excludes the imported modules from all later collections."""
    gc.collect()
    gc.freeze()
