"""Fixtures of the engine's tests.

Their prompts are short, and over pages would all be computed like rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from chairlift.cache import capacity
from chairlift.cache.pages import page
from chairlift.engine.model.paged import inputs


@pytest.fixture(autouse=True, scope="module")
def _prompts_are_computed_in_both_ways() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "FEW_TOKENS", 12)
        yield


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Memory grows by 16 tokens instead of 64: rows outgrow it in a quarter of the steps."""
    assert page.PAGE_TOKENS == capacity.COLUMN_STEP
    before = page.PAGE_TOKENS
    _set_block_tokens(16)
    yield
    _set_block_tokens(before)


def _set_block_tokens(tokens: int) -> None:
    """Sets the sizes in each module that has imported them, also during the tests."""
    for module in list(sys.modules.values()):
        for name in ("PAGE_TOKENS", "COLUMN_STEP"):
            if name in vars(module):
                setattr(module, name, tokens)


@pytest.fixture
def same_stream() -> Iterator[None]:
    """Restores the default stream, which a ``ThreadDispatch`` replaces."""
    before = mx.default_stream(mx.default_device())
    yield
    mx.set_default_stream(before)


@pytest.fixture
def traceable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes the host kernels that other tests installed in model files: MLX cannot trace them."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("mlx_lm.models.", "mlx_vlm.models.")):
            for key, value in list(vars(module).items()):
                if key != "scaled_dot_product_attention" and _is_replacement(value):
                    monkeypatch.setitem(vars(module), key, _replaced(value))


def _is_replacement(value: Any) -> bool:
    return "replaces" in getattr(value, "__dict__", {})


def _replaced(function: Any) -> Any:
    while _is_replacement(function):
        function = function.replaces
    return function
