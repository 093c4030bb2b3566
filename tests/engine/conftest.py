"""The engine's tests have short prompts, which over pages would all be computed like rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chairlift.engine.model.paged import inputs


@pytest.fixture(autouse=True, scope="module")
def _prompts_are_computed_in_both_ways() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "FEW_TOKENS", 12)
        yield
