"""Processors of transformers in the form that needs no torchvision."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType


@contextmanager
def pil_backend(model: str | None) -> Iterator[None]:
    """A context in which the image processor of ``model`` has its results from Pillow.

    Some code of mlx-vlm imports the one that needs torchvision. Where that is installed, or
    ``model`` is None, nothing changes.
    """
    if model is None or find_spec("torchvision") is not None:
        yield
        return
    package = f"transformers.models.{model}"
    pil = importlib.import_module(f"{package}.image_processing_pil_{model}")
    name = f"{package}.image_processing_{model}"
    stand_in = ModuleType(name)
    for each in (each for each in vars(pil) if each.endswith("Pil")):
        setattr(stand_in, each.removesuffix("Pil"), getattr(pil, each))
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]
