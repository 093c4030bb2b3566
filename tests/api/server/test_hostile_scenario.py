"""The load test's scenario of hostile bodies, against a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from chairlift.loadtest.faults.__main__ import main
from chairlift.loadtest.faults.hostile_bodies import ENDPOINTS, hostile_bodies

pytestmark = pytest.mark.system


def test_hostile_bodies_are_the_same_for_a_seed_and_stay_within_their_size() -> None:
    fields = {path: ["model", "stop"] for path in ENDPOINTS}
    sizes = (4096, 65536)

    def first_500() -> list[tuple[str, bytes]]:
        bodies = hostile_bodies(fields, 7, sizes, 2048)
        return [(b.path, b.body) for _, b in zip(range(500), bodies, strict=False)]

    first = first_500()
    assert first == first_500()
    assert {path for path, _ in first} == set(ENDPOINTS)
    # Lists of stops and biases have a size of their own.
    assert sum(len(body) > 65536 for _, body in first) < 30


async def test_the_server_survives_the_scenario(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    arguments = (
        *("hostile", "--model", str(tiny), "--out", str(out), "--size", "1"),
        # Generous limits: the machine may be busy.
        *("--requests", "20", "--pause", "10", "--answer", "60", "--memory", "20"),
    )
    assert await asyncio.to_thread(main, arguments) == 0
    figures = json.loads(out.read_text())
    assert figures["requests"] == 20
    assert set(figures["statuses"]) <= {"200", "400", "413", "429"}
