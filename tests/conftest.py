"""What has to happen before any test."""

from __future__ import annotations

from chairlift.engine.cpu.blas import load_fast_blas

# Before any test imports MLX: its own BLAS on Linux would make the suite take an hour.
load_fast_blas()
