"""A real server that tests of clients share: a tiny model that passes for the default one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.api.server import Server, serving
from support.models import write_tiny_default_gguf

from chairlift.engine.config import DEFAULT_MODEL


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model's tokenizer, template and name, with weights that cost next to nothing.

    These tests are about requests and replies; tests/docs/test_cookbook.py asks the default model.
    """
    folder = tmp_path_factory.mktemp("clients")
    model = folder / "tiny.gguf"
    write_tiny_default_gguf(model)
    with serving(folder, str(model), "--served-model-name", DEFAULT_MODEL) as server:
        yield server


@pytest.fixture(scope="session")
def base_url(server: Server) -> str:
    return f"{server.url}/v1"
