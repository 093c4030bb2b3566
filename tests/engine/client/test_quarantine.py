"""The quarantine finds the requests that crash the engine, whatever runs beside them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from chairlift.engine.client.quarantine import CLEARED_TOKENS, Quarantine

LENGTH = 60
ROWS = 6


@dataclass(eq=False)
class Request:
    """A request that crashes the engine before its token number ``poison``, or never."""

    poison: int | None = None
    tokens: int = 0
    convicted: bool = False

    @property
    def finished(self) -> bool:
        return self.convicted or self.tokens == LENGTH

    @property
    def progress(self) -> dict[int, int]:
        return {} if self.finished else {0: self.tokens}


@dataclass
class Engine:
    """Computes the first ``ROWS`` admitted requests, a token a step, and crashes by poison."""

    requests: list[Request]
    quarantine: Quarantine[Request] = field(default_factory=Quarantine)
    crashes: int = 0

    @property
    def computing(self) -> list[Request]:
        admitted = [r for r in self.requests if not r.finished and self.quarantine.admits(r)]
        return admitted[:ROWS]

    def run(self, kills: list[int]) -> None:
        """Runs all requests to their end; the engine is killed before each of these steps."""
        step = 0
        while computing := self.computing:
            step += 1
            killed = step in kills
            if killed or any(r.tokens == r.poison for r in computing):
                self._die(computing, killed)
                continue
            for request in computing:
                request.tokens += 1
            self.quarantine.tidy()

    def _die(self, computing: list[Request], killed: bool) -> None:
        self.crashes += 1
        guilty = self.quarantine.crashed(computing, killed)
        if guilty is not None:
            guilty.convicted = True
            self.quarantine.tidy()


def test_kills_from_outside_fail_no_request() -> None:
    engine = Engine([Request() for _ in range(10)])
    engine.run(kills=[5, 6, 20, 40])
    assert engine.crashes == 4
    assert all(r.tokens == LENGTH for r in engine.requests)
    assert not engine.quarantine.active


@pytest.mark.parametrize("poison", [0, 1, 17, LENGTH - 1])
def test_one_guilty_request_among_many_is_found_in_three_crashes(poison: int) -> None:
    engine = Engine([Request() for _ in range(3)] + [Request(poison)])
    engine.run(kills=[])
    assert [r.convicted for r in engine.requests] == [False] * 3 + [True]
    assert engine.crashes == 3


def test_a_single_guilty_request_is_found_in_two_crashes() -> None:
    engine = Engine([Request(3)])
    engine.run(kills=[])
    assert (engine.crashes, engine.requests[0].convicted) == (2, True)


def test_a_suspect_killed_in_its_trial_is_tried_again() -> None:
    requests = [Request(), Request()]
    quarantine: Quarantine[Request] = Quarantine()
    for _ in range(2):
        assert quarantine.crashed(requests, killed=True) is None
    assert quarantine.crashed(requests[:1], killed=True) is None
    assert quarantine.alone is requests[0]
    assert quarantine.crashed(requests[:1], killed=True) is requests[0]


def test_a_suspect_runs_alone_until_it_has_passed_the_crash() -> None:
    requests = [Request(tokens=tokens) for tokens in (30, 10)]
    quarantine: Quarantine[Request] = Quarantine()
    for _ in range(2):
        assert quarantine.crashed(requests) is None
    assert quarantine.alone is requests[1]
    requests[1].tokens += CLEARED_TOKENS - 1
    quarantine.tidy()
    assert quarantine.alone is requests[1]
    requests[1].tokens += 1
    quarantine.tidy()
    assert quarantine.alone is requests[0]
    requests[0].tokens = LENGTH
    quarantine.tidy()
    assert not quarantine.active


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_innocent_requests_survive(seed: int) -> None:
    random_ = random.Random(seed)
    requests = [
        Request(random_.randrange(LENGTH) if random_.random() < 0.2 else None)
        for _ in range(random_.randrange(1, 20))
    ]
    engine = Engine(requests)
    # Two kills at any time, also in trials; two kills of one trial would look like guilt.
    engine.run(kills=[random_.randrange(1, 40), random_.randrange(60, 150)])
    for request in requests:
        assert request.convicted == (request.poison is not None)
        assert request.finished
    assert engine.crashes <= 2 + 3 * sum(r.convicted for r in requests)
