"""Lets mlx-lm and transformers import the hub's client only when they use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

# The names that mlx-lm and transformers import from the client, and servers of local files never
# use.
_NAMES = ("snapshot_download", "CommitOperationAdd", "HfApi", "ModelCard", "ModelCardData")
_CLIENT = "huggingface_hub.hf_api"


class _Later(type):
    """Stands for a function or class of the hub's client, which its first use imports."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._real()(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._real(), name)

    def _real(cls) -> Any:
        return getattr(import_module("huggingface_hub"), cls.__name__)


@contextmanager
def hub_client_later() -> Iterator[None]:
    """Within the context, imports of the hub's client import names that import it when used.

    The client takes a quarter of mlx-lm's import. Imports after the context get the client itself.
    """
    hub = import_module("huggingface_hub")
    names = () if _CLIENT in sys.modules else set(_NAMES).difference(vars(hub))
    for name in names:
        setattr(hub, name, _Later(name, (), {}))
    try:
        yield
    finally:
        for name in names:
            delattr(hub, name)
