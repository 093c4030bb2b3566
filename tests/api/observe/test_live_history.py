"""The history of the live view: samples at random times, sleeping machines, restarts, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.fake_engine import step_stats

from chairlift.api.observe.history import (
    INTERVAL_SECONDS,
    MAX_SAMPLES,
    MIN_SECONDS,
    SPAN_SECONDS,
    WINDOW_SECONDS,
    History,
    Moment,
    Sample,
)
from chairlift.engine.messages import StepStats


@dataclass
class Event:
    """Some steps, the time until the end of their interval, and what else happened in it."""

    awake: float
    asleep: float
    latencies: list[float]
    steps: int
    serving: bool
    read: bool


START = Moment(1000.0, 500.0)
EVENTS = st.lists(
    st.builds(
        Event,
        awake=st.floats(0, 30),
        asleep=st.one_of(st.just(0.0), st.floats(0, 5000)),
        latencies=st.lists(st.floats(1e-4, 100), max_size=5),
        steps=st.integers(0, 3),
        serving=st.booleans(),
        read=st.booleans(),
    ),
    max_size=60,
)


@dataclass
class Run:
    """A history, its clock, and a watcher that reads it now and then."""

    now: Moment = START
    history: History = field(default_factory=lambda: History(START))
    read: list[Sample] = field(default_factory=list)
    sent: int = 0

    def play(self, event: Event) -> None:
        for _ in range(event.steps):
            self.history.add_step(step_stats(event.latencies))
        at, awake = self.now
        self.now = Moment(at + event.awake + event.asleep, awake + event.awake)
        self.history.end_interval(self.now, event.serving, 1024)
        if event.read:
            self.get()

    def get(self) -> None:
        samples, self.sent = self.history.since(self.sent)
        self.read += samples

    @property
    def samples(self) -> list[Sample]:
        return list(self.history.since(0)[0])


@given(EVENTS)
def test_the_samples_tell_what_the_steps_did(events: list[Event]) -> None:
    run = Run()
    every: dict[float, Sample] = {}
    generated = prefilled = 0
    for event in events:
        run.play(event)
        generated += event.steps * (1 + len(event.latencies))
        prefilled += event.steps * 10
        every.update((sample.at, sample) for sample in run.samples)
    run.get()
    open_interval = run.history.current
    assert open_interval.generated + sum(
        (sample.generated_pace or 0) * sample.seconds for sample in every.values()
    ) == pytest.approx(generated, rel=0.01, abs=0.01)
    assert open_interval.prefilled + sum(
        (sample.prefilled_pace or 0) * sample.seconds for sample in every.values()
    ) == pytest.approx(prefilled, rel=0.01, abs=0.01)
    for sample in every.values():
        assert sample.itl_p50 is None or 1e-5 < sample.itl_p50 <= (sample.itl_p99 or 0)
        # What was down and did nothing is unknown; an idle server is at zero.
        if sample.generated_pace is None:
            assert not sample.serving
            assert (sample.running, sample.kv_share, sample.ttft_p50) == (None, None, None)


@given(EVENTS)
def test_the_samples_are_in_order_bounded_and_read_once(events: list[Event]) -> None:
    run = Run()
    for event in events:
        run.play(event)
    run.get()
    samples = run.samples
    assert len(samples) <= MAX_SAMPLES
    for sample in samples:
        assert samples[-1].at - SPAN_SECONDS <= sample.at <= run.now.at + 1e-3
        assert sample.seconds >= MIN_SECONDS - 1e-3
    for first, second in pairwise(samples):
        # Their spans do not overlap; the machine slept in between.
        assert second.at - second.seconds >= first.at - 2e-3
    # A watcher that was late misses only what is too old by now.
    assert run.read[len(run.read) - len(samples) :] == samples
    assert sorted(sample.at for sample in run.read) == [sample.at for sample in run.read]


def test_memory_is_bounded_over_hours() -> None:
    run = Run()
    for _ in range(3 * MAX_SAMPLES):
        run.play(Event(INTERVAL_SECONDS, 0, [0.1], 1, True, False))
    samples = run.samples
    assert len(samples) == MAX_SAMPLES
    assert samples[-1].at - samples[0].at == SPAN_SECONDS - INTERVAL_SECONDS
    assert len(run.history._window) == WINDOW_SECONDS / INTERVAL_SECONDS
    for _ in range(2 * MAX_SAMPLES):
        run.play(Event(MIN_SECONDS, 0, [0.1], 1, True, False))
    assert len(run.samples) == MAX_SAMPLES


def test_a_sleeping_machine_leaves_a_gap_and_no_old_latencies() -> None:
    run = Run()
    run.play(Event(2, 0, [0.1], 1, True, False))
    run.play(Event(2, 600, [], 0, True, False))
    first, second = run.samples
    assert (second.at - first.at, second.seconds) == (602, 2)
    assert run.history.last_minute(run.now).itl.at((0.5,)) is None
    run.play(Event(2, 600, [], 0, True, False))
    assert [sample.at for sample in run.samples] == [second.at, second.at + 602]


def test_a_restart_is_marked_and_its_time_is_unknown() -> None:
    run = Run()
    run.play(Event(2, 0, [0.1], 1, True, False))
    run.history.current.restarts += 1
    # A request that arrives now is reported without a step.
    run.history.add_step(StepStats(waiting=1))
    run.play(Event(2, 0, [], 0, False, False))
    run.play(Event(2, 0, [], 0, True, False))
    before, during, after = run.samples
    assert [sample.restarts for sample in run.samples] == [0, 1, 0]
    assert (before.generated_pace, during.generated_pace, after.generated_pace) == (1, None, 0)
    assert (before.running, during.running) == (3, None)
    assert before.kv_share == 0.5


def test_the_shown_numbers_cover_a_minute_and_the_last_seconds() -> None:
    run = Run()
    for second in range(100):
        run.play(Event(2, 0, [float(second + 1)] * 9, 1, True, False))
    minute = run.history.last_minute(run.now)
    found = minute.itl.at((0, 0.5, 1))
    # Those of the last 30 intervals.
    assert found == pytest.approx([71, 85, 100], rel=0.03)
    assert run.history.paces(run.now) == (5, 5)
    run.history.add_step(StepStats(prefill_tokens=40))
    assert run.history.paces(Moment(run.now.at + 1, run.now.awake + 1)) == (4, 12)


def test_a_new_server_has_a_pace_at_once() -> None:
    run = Run()
    run.history.add_step(step_stats([0.1] * 9))
    assert run.history.paces(run.now) == (20, 20)
