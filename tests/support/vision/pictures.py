"""The files of random pictures."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def picture(
    seed: int, width: int = 40, height: int = 24, kind: str = "PNG", **settings: Any
) -> bytes:
    """The file of a random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **settings)
    return file.getvalue()
