"""What tells our caches from mlx-lm's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache


def has_rows(cache: Any) -> bool:
    """Whether it is a layer of ours: with positions ``[rows]`` for its ``offset``."""
    offset = getattr(cache, "offset", None)
    return isinstance(offset, mx.array) and not isinstance(cache, _BaseCache)
