"""Fixtures for all tests of the API."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import tiny_model_dir


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random llama."""
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")
