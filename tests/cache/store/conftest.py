"""Prefix stores that share one directory and are closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cache.store import KINDS, LARGE, MODEL, MakeStore

from chairlift.cache.store.store import PrefixStore


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    """Opens stores in one directory, and closes them after the test."""
    stores: list[PrefixStore] = []

    def make(budget: int = LARGE, model: str = MODEL, **options: Any) -> PrefixStore:
        kinds = options.pop("kinds", KINDS)
        stores.append(PrefixStore(tmp_path / "prefixes", budget, model, kinds, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close(5)
