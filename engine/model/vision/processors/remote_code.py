"""Keeps mlx-vlm from running code of a model's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
        # What came of it may say something else.
        raise (refused if tried else error) from error
    finally:
        dynamic_module_utils.get_class_in_module = loader
