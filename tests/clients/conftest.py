"""Real servers that tests of clients share: one passes for the default model, both are tiny."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.api.server import Server, serving
from support.models import write_tiny_default_gguf
from support.tiny import tiny_model_dir

from chairlift.engine.config import DEFAULT_MODEL


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model's tokenizer, template and name, with weights that cost next to nothing.

    These tests are about requests and replies; tests/docs/test_guides.py asks the default model.
    """
    folder = tmp_path_factory.mktemp("clients")
    model = folder / "tiny.gguf"
    write_tiny_default_gguf(model)
    with serving(folder, str(model), "--served-model-name", DEFAULT_MODEL) as server:
        yield server


@pytest.fixture(scope="session")
def base_url(server: Server) -> str:
    return f"{server.url}/v1"


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model whose tokens are bytes, under its own name: "tiny-llama"."""
    folder = tmp_path_factory.mktemp("bytes")
    with serving(folder, str(tiny_model_dir(folder, "llama"))) as server:
        yield server
