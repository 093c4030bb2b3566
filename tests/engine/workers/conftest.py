"""Worker processes for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support import worker_jobs as jobs
from support.paths import TESTS

from chairlift.engine.workers import pool
from chairlift.engine.workers.pool import Workers


@pytest.fixture(autouse=True)
def _jobs_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process may take long to start."""
    monkeypatch.setattr(pool, "WAIT_SECONDS", 180.0)


@pytest.fixture(autouse=True, scope="session")
def _children_import_jobs() -> None:
    """By the module's name."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))
    )


@pytest.fixture(scope="module")
def outcomes() -> list[str]:
    return []


@pytest.fixture(scope="module")
def workers(outcomes: list[str]) -> Iterator[Workers]:
    workers = Workers(jobs.MODULES, record=outcomes.append)
    yield workers
    workers.close()
