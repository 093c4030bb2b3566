"""jina_vlm: each row is rotated by its own positions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.jina_vlm import language

    base: Any = language.RoPE

    class RowRoPE(base):  # type: ignore[misc]
        """A rotation that takes the positions of rows."""

        def __call__(self, x: mx.array, offset: Any = 0) -> Any:
            if not isinstance(offset, mx.array):
                return super().__call__(x, offset)
            return mx.fast.rope(
                x, self.dims, traditional=False, base=self.theta, scale=1.0, offset=offset
            )

    return {base: RowRoPE}
