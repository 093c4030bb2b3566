"""Imports mlx-lm: the limit of open files stays as it is, and unused modules are left out."""

from __future__ import annotations

import resource

from chairlift.engine.device.backend import import_mlx
from chairlift.engine.device.light_http import import_http_client
from chairlift.engine.device.light_hub import hub_client_later
from chairlift.engine.device.transformers_cache import cache_transformers_scan


def import_mlx_lm() -> None:
    """Imports mlx-lm; call it before any other import of mlx-lm.

    mlx-lm would set the limit of open files to 2048 permanently, fewer than a server may have
    connections. Where the hard limit is below 4096, the import would fail.

    Raises:
        BackendError: MLX cannot be imported here.
    """
    import_mlx()
    import_http_client()
    cache_transformers_scan()
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        with hub_client_later():
            import mlx_lm  # noqa: F401
    finally:
        resource.setrlimit = setrlimit
