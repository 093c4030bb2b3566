"""Distinguishes the engine's batched caches from mlx-lm's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache


def has_rows(cache: Any) -> bool:
    """Whether ``cache`` is a batched layer, whose ``offset`` are positions ``[rows]``."""
    offset = getattr(cache, "offset", None)
    return isinstance(offset, mx.array) and not isinstance(cache, _BaseCache)
