"""A grammar checker with real worker processes, for the tests of structured output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.api.fake_engine import byte_tokenizer

from chairlift.engine.grammar.checker import Checker
from chairlift.engine.grammar.language import lexicon
from chairlift.engine.workers.pool import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    workers = Workers(["chairlift.engine.grammar.trial"])
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def checker(workers: Workers) -> Checker:
    return Checker(lambda: lexicon(byte_tokenizer(), 258), workers)
