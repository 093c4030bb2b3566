"""The predicted wait: which requests are ahead, and how long their work takes."""

from __future__ import annotations

import math
import random

import pytest

from chairlift.scheduler.forecast import Claim, Forecast, Rates

AGEING = 10.0


def _forecast(prompt_seconds: float = 0.0, output_seconds: float = 1.0) -> Forecast:
    """A forecast that has measured the seconds of prompt and output tokens."""
    forecast = Forecast()
    for _ in range(100):
        forecast.rates.learn(0, 4, 4 * output_seconds)
        forecast.rates.learn(50, 4, 50 * prompt_seconds + 4 * output_seconds)
    return forecast


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_prompt_and_output_rates_are_separated(noise: float) -> None:
    random_, rates = random.Random(0), Rates()
    for step in range(400):
        prompt, rows = (200 if step % 4 == 0 else 0), random_.choice([8, 16])
        took = 0.001 * prompt + 0.004 * rows
        rates.learn(prompt, rows, took * random_.uniform(1 - noise, 1 + noise))
    assert rates.seconds(1000, 0) == pytest.approx(1.0, rel=0.1)
    assert rates.seconds(0, 1000) == pytest.approx(4.0, rel=0.1)
    assert rates.seconds(1000, 1000) == pytest.approx(5.0, rel=0.1)


def test_rates_follow_a_machine_that_slows_down() -> None:
    rates = Rates()
    for seconds in (0.01, 0.1):
        for _ in range(2000):
            rates.learn(0, 10, seconds)
    assert rates.seconds(0, 10) == pytest.approx(0.1, rel=0.05)


def test_unmeasured_work_takes_no_time() -> None:
    rates = Rates()
    assert rates.seconds(100, 100) == 0.0
    rates.learn(90, 10, 1.0)
    assert rates.seconds(90, 10) == pytest.approx(1.0)
    # A row alone takes long; beside a prompt ten rows ran in about that time.
    rates.learn(0, 1, 0.5)
    assert rates.seconds(0, 10) <= 1.0 + 1e-9


def test_running_requests_and_those_of_the_same_or_a_more_urgent_class_are_ahead() -> None:
    forecast = _forecast(0.01, 1.0)
    claims = {p: forecast.add(p, 100.0, 200, 10) for p in (-1, 0, 2)}
    waits = {p: forecast.wait(p, 100.0, AGEING) for p in (-2, -1, 0, 1, 2)}
    each = 200 * 0.01 + 10
    assert waits == pytest.approx({-2: 0, -1: each, 0: 2 * each, 1: 2 * each, 2: 3 * each})
    forecast.begin(claims[2])  # a running request is ahead of every class
    assert forecast.wait(-2, 100.0, AGEING) == pytest.approx(10)
    claims[2].spend(4)
    assert forecast.wait(-2, 100.0, AGEING) == pytest.approx(6)
    forecast.remove(claims[2])
    forecast.remove(claims[0])
    assert forecast.wait(5, 100.0, AGEING) == pytest.approx(each)
    forecast.remove(claims[-1])
    assert forecast.wait(5, 1e6, AGEING) == 0.0


def test_a_request_that_has_aged_past_the_class_difference_is_ahead() -> None:
    forecast = _forecast()
    for arrival in (0.0, 5.0, 9.0):
        forecast.add(3, arrival, 10, 100)
    first = 3 * AGEING
    ahead = {now: forecast.wait(0, now, AGEING) for now in (first - 0.1, first, first + 5, 99.0)}
    assert list(ahead.values()) == pytest.approx([0, 100, 200, 300])


def test_outputs_are_expected_to_use_the_same_share_of_max_tokens_as_before() -> None:
    forecast = _forecast()
    forecast.add(0, 0.0, 10, 1000)
    assert forecast.wait(0, 0.0, AGEING) == pytest.approx(1000)
    for _ in range(500):
        forecast.learn_output(100, 2000)
        forecast.learn_output(100, 100)
    assert forecast.wait(0, 0.0, AGEING) == pytest.approx(1000 * 200 / 2100, rel=0.05)


class _CountingTime(float):
    """A time of arrival that counts how often it is read."""

    reads = 0

    def __add__(self, other: float) -> float:
        _CountingTime.reads += 1
        return float(self) + other


def test_a_forecast_does_not_go_through_the_queue() -> None:
    """It reads no request of its class or a more urgent one; of the others, only those due."""
    forecast = _forecast()
    _CountingTime.reads = 0
    for number in range(3000):
        forecast.add(number % 3, _CountingTime(number), 1, 1)
    now = 3000.0
    assert forecast.wait(2, now, AGEING) == pytest.approx(3000)
    assert _CountingTime.reads == 0
    # The first 10 seconds of class 1 are due, none of class 2; the first one not due is read, too.
    assert forecast.wait(0, now, now - 10) == pytest.approx(1000 + 4)
    assert _CountingTime.reads == 4 + 2


def test_random_claims_leave_nothing_behind() -> None:
    random_, forecast = random.Random(1), _forecast()
    alive: dict[Claim, int] = {}
    now = 0.0
    for _ in range(2000):
        now += random_.random()
        if random_.random() < 0.3 or not alive:
            claim = forecast.add(random_.randrange(-2, 3), now, 5, 20)
            alive[claim] = 20
            continue
        claim = random_.choice(list(alive))
        if claim.prompt:
            forecast.begin(claim)
        spent = random_.randrange(1, alive[claim] + 1)
        claim.spend(spent)
        alive[claim] -= spent
        if not alive[claim]:
            forecast.remove(claim)
            del alive[claim]
        expected = sum(alive.values())
        assert forecast.wait(9, now, AGEING) == pytest.approx(expected)
    for claim in list(alive):
        forecast.remove(claim)
    assert forecast.wait(9, math.inf, AGEING) == 0.0
    assert not forecast._waiting
