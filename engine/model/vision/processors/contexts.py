"""Contexts in which code of mlx-vlm and transformers runs."""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@contextmanager
def silenced() -> Iterator[None]:
    """A context without what this code prints and warns of."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


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


@contextmanager
def remote_code(trusted: bool) -> Iterator[None]:
    """A context in which a folder's code runs only if it is trusted.

    Some of mlx-vlm's processors trust it whatever they are told.

    Raises:
        PermissionError: the folder's code would have run.
    """
    if trusted:
        yield
        return
    from transformers import dynamic_module_utils

    refused = PermissionError("its folder has code, which --trust-remote-code runs")
    tried = []

    def refuse(*arguments: Any, **settings: Any) -> Any:
        tried.append(arguments)
        raise refused

    loader = dynamic_module_utils.get_class_in_module
    dynamic_module_utils.get_class_in_module = refuse
    try:
        yield
    except Exception as error:
        # The refusal may have led to this other error, which would mislead.
        raise (refused if tried else error) from error
    finally:
        dynamic_module_utils.get_class_in_module = loader
