"""Loads the fast BLAS before any test imports MLX, and drops the user's own API key."""

from __future__ import annotations

import gc
import os

import pytest

from chairlift.engine.cpu.blas import load_fast_blas

# With MLX's own BLAS on Linux the suite would take an hour.
load_fast_blas()

# Servers in the tests would require it of clients.
os.environ.pop("OPENAI_API_KEY", None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the files with real servers first.

    They take the longest. The last file to run should be a short one, because the other workers
    are idle meanwhile.
    """
    slow = {item.path for item in items if item.get_closest_marker("system")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Excludes the imported modules from all later collections of garbage."""
    gc.collect()
    gc.freeze()
