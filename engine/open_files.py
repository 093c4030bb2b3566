"""mlx-lm sets this process's limit of open files; a server wants the one that it was given."""

from __future__ import annotations

import resource


def import_mlx_lm() -> None:
    """Imports mlx-lm without the limit that it sets meanwhile; to be called before others do.

    It would be 2048, fewer than a server may have connections, and for good. Where no more than
    4096 are allowed, the import would fail.
    """
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        import mlx_lm  # noqa: F401
    finally:
        resource.setrlimit = setrlimit
