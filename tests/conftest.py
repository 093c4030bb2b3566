"""Loads the fast BLAS before any test imports MLX."""

from __future__ import annotations

from chairlift.engine.cpu.blas import load_fast_blas

# With MLX's own BLAS on Linux the suite would take an hour.
load_fast_blas()
