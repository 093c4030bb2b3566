"""Imports mlx-lm without what it does to this process, and without what servers never use."""

from __future__ import annotations

import resource
import sys
from types import ModuleType
from typing import cast

from chairlift.engine.device.backend import import_mlx
from chairlift.engine.device.transformers_cache import cache_transformers_scan

_CLIENT = "httpx._main"


def import_mlx_lm() -> None:
    """Imports mlx-lm; call it before any other import of mlx-lm.

    mlx-lm would set the limit of open files to 2048 permanently, fewer than a server may have
    connections. Where the hard limit is below 4096, the import would fail. And it imports httpx,
    whose command-line client takes a tenth of the time; httpx does without that one if it cannot
    be imported.

    Raises:
        BackendError: MLX cannot be imported here.
    """
    import_mlx()
    cache_transformers_scan()
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    client = sys.modules.setdefault(_CLIENT, cast(ModuleType, None))
    try:
        import mlx_lm  # noqa: F401
    finally:
        resource.setrlimit = setrlimit
        if client is None:
            del sys.modules[_CLIENT]
