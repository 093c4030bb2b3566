"""Imports httpx, the hub's HTTP client, without its command-line client."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast

_CLIENT = "httpx._main"


def import_httpx() -> None:
    """Imports httpx; call it before an import of mlx-lm or of the hub's client, which import it.

    The command-line client takes half of the time; httpx does without it if it cannot be imported.
    """
    client = sys.modules.setdefault(_CLIENT, cast(ModuleType, None))
    try:
        import httpx  # noqa: F401
    finally:
        if client is None:
            del sys.modules[_CLIENT]
