"""One real server with the default model, for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_server import serving


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("clients")) as server:
        yield f"{server.url}/v1"
