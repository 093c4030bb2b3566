"""Imports the hub's HTTP client without its command-line client."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast

_COMMANDS = "httpx._main"


def import_http_client() -> None:
    """Imports the HTTP client of huggingface-hub; call it before mlx-lm or the hub is imported.

    The hub before version 2 has httpx, whose command-line client takes half of the time of its
    import; httpx does without it if it cannot be imported. Later versions of the hub have httpx2,
    which imports its own when it is called.
    """
    commands = sys.modules.setdefault(_COMMANDS, cast(ModuleType, None))
    try:
        import huggingface_hub.errors  # noqa: F401 (it imports the client)
    finally:
        if commands is None:
            del sys.modules[_COMMANDS]
