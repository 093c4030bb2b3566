"""A real server with the default model, which all tests of clients share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.api.server import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("clients")) as server:
        yield server


@pytest.fixture(scope="session")
def base_url(server: Server) -> str:
    return f"{server.url}/v1"
