"""The predicted wait: whose work is ahead, and how long it takes by what was measured."""

from __future__ import annotations

import math
import random

import pytest

from chairlift.scheduler.forecast import Claim, Forecast, Rates

AGEING = 10.0


def _forecast(prompt_seconds: float = 0.0, output_seconds: float = 1.0) -> Forecast:
    """One that has measured what a token of each sort takes."""
    forecast = Forecast()
    for _ in range(100):
        forecast.rates.learn(0, 4, 4 * output_seconds)
        forecast.rates.learn(50, 4, 50 * prompt_seconds + 4 * output_seconds)
    return forecast


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_rates_are_told_apart(noise: float) -> None:
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


def test_what_is_not_known_yet_takes_no_time_and_what_is_takes_what_it_took() -> None:
    rates = Rates()
    assert rates.seconds(100, 100) == 0.0
    rates.learn(90, 10, 1.0)
    assert rates.seconds(90, 10) == pytest.approx(1.0)
    # A few rows alone are slow, each; beside prompts many ran in the time of one.
    rates.learn(0, 1, 0.5)
    assert rates.seconds(0, 10) <= 1.0 + 1e-9


def test_all_that_runs_and_all_of_its_class_or_a_more_urgent_one_is_ahead() -> None:
    forecast = _forecast(0.01, 1.0)
    claims = {p: forecast.add(p, 100.0, 200, 10) for p in (-1, 0, 2)}
    waits = {p: forecast.wait(p, 100.0, AGEING) for p in (-2, -1, 0, 1, 2)}
    each = 200 * 0.01 + 10
    assert waits == pytest.approx({-2: 0, -1: each, 0: 2 * each, 1: 2 * each, 2: 3 * each})
    forecast.begin(claims[2])  # whoever runs is ahead of all
    assert forecast.wait(-2, 100.0, AGEING) == pytest.approx(10)
    claims[2].spend(4)
    assert forecast.wait(-2, 100.0, AGEING) == pytest.approx(6)
    forecast.remove(claims[2])
    forecast.remove(claims[0])
    assert forecast.wait(5, 100.0, AGEING) == pytest.approx(each)
    forecast.remove(claims[-1])
    assert forecast.wait(5, 1e6, AGEING) == 0.0


def test_who_has_waited_for_the_difference_is_ahead() -> None:
    forecast = _forecast()
    for arrival in (0.0, 5.0, 9.0):
        forecast.add(3, arrival, 10, 100)
    first = 3 * AGEING
    ahead = {now: forecast.wait(0, now, AGEING) for now in (first - 0.1, first, first + 5, 99.0)}
    assert list(ahead.values()) == pytest.approx([0, 100, 200, 300])


def test_of_what_may_be_generated_as_much_is_expected_as_was_used() -> None:
    forecast = _forecast()
    forecast.add(0, 0.0, 10, 1000)
    assert forecast.wait(0, 0.0, AGEING) == pytest.approx(1000)
    for _ in range(500):
        forecast.learn_output(100, 2000)
        forecast.learn_output(100, 100)
    assert forecast.wait(0, 0.0, AGEING) == pytest.approx(1000 * 200 / 2100, rel=0.05)


class _Watched(float):
    """A time of arrival that counts how often it is asked for."""

    looks = 0

    def __add__(self, other: float) -> float:
        _Watched.looks += 1
        return float(self) + other


def test_a_forecast_does_not_go_through_the_queue() -> None:
    """Nobody of its class or a more urgent one is looked at; of others, those that are due."""
    forecast = _forecast()
    _Watched.looks = 0
    for number in range(3000):
        forecast.add(number % 3, _Watched(number), 1, 1)
    now = 3000.0
    assert forecast.wait(2, now, AGEING) == pytest.approx(3000)
    assert _Watched.looks == 0
    # Of class 1 the first 10 seconds are due, of class 2 none, and one is seen that is not.
    assert forecast.wait(0, now, now - 10) == pytest.approx(1000 + 4)
    assert _Watched.looks == 4 + 2


def test_random_life_leaves_nothing_behind() -> None:
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
