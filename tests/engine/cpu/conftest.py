"""Runs a test once with each way of multiplying few tokens that a machine may have."""

from __future__ import annotations

import pytest

from chairlift.engine.cpu import host_linear
from chairlift.engine.cpu.matrix import Backend, backends


@pytest.fixture(params=["AMX", "compiled kernel", "BLAS"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The one that models get; the test is skipped where the machine lacks it."""
    found = [backend for backend in backends() if backend.name == request.param]
    if not found:
        pytest.skip(f"this machine has no such products: {request.param}")
    monkeypatch.setattr(host_linear, "backends", lambda: found)
    return found[0]
