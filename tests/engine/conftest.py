"""Fixtures of the engine's tests.

Their prompts are short, and over pages would all be computed like rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from chairlift.engine.model.paged import inputs


@pytest.fixture(autouse=True, scope="module")
def _prompts_are_computed_in_both_ways() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "FEW_TOKENS", 12)
        yield


@pytest.fixture
def same_stream() -> Iterator[None]:
    """Restores the default stream, which a ``ThreadDispatch`` replaces."""
    before = mx.default_stream(mx.default_device())
    yield
    mx.set_default_stream(before)
