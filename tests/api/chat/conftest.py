"""A fixture for tests that read many truncated replies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chairlift.api.chat import calls


@pytest.fixture(scope="module")
def generous_parse_time() -> Iterator[None]:
    """Raises the time limit of a parser: it is wall time, which other load uses up, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "PARSE_SECONDS", 60.0)
        yield
