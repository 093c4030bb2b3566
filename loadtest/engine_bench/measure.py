"""The measurements: a mixed load, and pure decode steps."""

from __future__ import annotations

import statistics
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from chairlift.cache.capacity import KVGeometry
from chairlift.loadtest.engine_bench.engines import BenchRequest, Engine
from chairlift.loadtest.engine_bench.load import Arrival, Load, Range
from chairlift.loadtest.timeline import Timeline, record

# Pure decode steps that are timed, and warm-up steps before them.
TIMED, WARM = 30, 10
PROGRESS_SECONDS = 30.0
# With fewer rows the rounding of buffers hides how well memory is used.
SOME_ROWS = 16
# More steps than any engine computes in a second.
MAX_STEPS_PER_SECOND = 2000


@dataclass(slots=True)
class MixedLoad:
    """The measurements of a mixed load.

    A gap is the time of a step. ITL, the time between two tokens of a row, counts a gap once for
    each row that waited.

    Attributes:
        tokens: generated tokens.
        seconds: duration.
        peak_bytes: peak of MLX's memory.
        reserved_bytes: the most KV memory that was allocated.
        reserved_over_used: the largest ratio of allocated KV memory to that of tokens, in steps of
            more than ``SOME_ROWS`` rows; 0 if the engine does not report it.
        gaps: milliseconds between successive steps that generated tokens, without idle times.
        gap_rows: the rows that waited for the second step of each gap.
    """

    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    reserved_over_used: float = 0.0
    gaps: list[float] = field(default_factory=list)
    gap_rows: list[int] = field(default_factory=list)

    def figures(self, weights: int) -> dict[str, float]:
        """The figures to report; ``weights`` is the model's size in bytes."""
        return {
            "output_tokens_per_s": self.tokens / self.seconds,
            **self._gap_figures(),
            "seconds": self.seconds,
            "peak_gb": self.peak_bytes / 1e9,
            "kv_reserved_gb": self.reserved_bytes / 1e9,
            "kv_reserved_over_used": self.reserved_over_used,
            "peak_over_weights_and_kv": self.peak_bytes / (weights + self.reserved_bytes),
        }

    def _gap_figures(self) -> dict[str, float]:
        """The figures of gaps; empty if there were none, as with outputs of one token."""
        if not self.gaps:
            return {}
        gaps = sorted(self.gaps)
        itl_p50, itl_p99 = quantiles(self.gaps, self.gap_rows, (0.5, 0.99))
        return {
            "gap_p50_ms": gaps[len(gaps) // 2],
            "gap_p99_ms": gaps[int(len(gaps) * 0.99)],
            "gap_max_ms": gaps[-1],
            "itl_p50_ms": itl_p50,
            "itl_p99_ms": itl_p99,
        }


def mixed(engine: Engine, arrivals: Sequence[Arrival], what: str) -> MixedLoad:
    """Submits the requests as they arrive, and runs the engine until they have ended."""
    mx.reset_peak_memory()
    load = MixedLoad()
    waiting = deque(arrivals)
    added = ended = 0
    start = shown = time.perf_counter()
    last: float | None = None  # the last step that generated tokens, unless the engine was idle
    while ended < len(arrivals):
        now = time.perf_counter() - start
        while waiting and waiting[0].at <= now:
            engine.add([waiting.popleft().request])
            added += 1
        if added == ended:
            last = None
            time.sleep(waiting[0].at - now)
            continue
        turn = engine.step()
        now = time.perf_counter()
        if turn.tokens:
            if last is not None:
                load.gaps.append((now - last) * 1e3)
                load.gap_rows.append(turn.rows)
            last = now
        load.tokens += turn.tokens
        load.reserved_bytes = max(load.reserved_bytes, engine.reserved)
        if turn.tokens > SOME_ROWS and engine.used:
            ratio = engine.reserved / engine.used
            load.reserved_over_used = max(load.reserved_over_used, ratio)
        ended += turn.ended
        if now - shown > PROGRESS_SECONDS:
            print(
                f"{what}: {ended}/{len(arrivals)} requests, {load.tokens} tokens", file=sys.stderr
            )
            shown = now
    load.seconds = time.perf_counter() - start
    load.peak_bytes = mx.get_peak_memory()
    return load


def quantiles(
    numbers: Sequence[float], weights: Sequence[int], shares: Sequence[float]
) -> list[float]:
    """The smallest of the numbers up to which each share of all weight lies."""
    ordered = sorted(zip(numbers, weights, strict=True))
    reached = list(accumulate(weight for _, weight in ordered))
    return [ordered[bisect_left(reached, share * reached[-1])][0] for share in shares]


def await_rows(engine: Engine, rows: int) -> None:
    """Runs steps until one gives a token to each of ``rows`` rows.

    Raises:
        ValueError: a row has ended before.
    """
    while (turn := engine.step()).rows < rows:
        if turn.ended:
            raise ValueError(f"{rows} rows never decode together: the KV memory is too small")


class Decode(NamedTuple):
    """The median milliseconds of a step, and a timeline of one second of steps if requested."""

    step_ms: float
    timeline: Timeline | None


def decode_step(engine: Engine, rows: int, context: int, vocabulary: int, timeline: bool) -> Decode:
    """Times pure decode steps of ``rows`` rows with prompts of ``context`` tokens.

    Raises:
        ValueError: there is no room for them.
    """
    output = WARM + TIMED + (MAX_STEPS_PER_SECOND if timeline else 200)
    engine.add(_alike(rows, context, output, vocabulary))
    await_rows(engine, rows)
    times = []
    for step in range(WARM + TIMED):
        start = time.perf_counter()
        assert engine.step().tokens == rows
        if step >= WARM:
            times.append((time.perf_counter() - start) * 1e3)
    return Decode(statistics.median(times), record(engine.step) if timeline else None)


def steps_in_turn(
    engines: Sequence[Engine], rows: int, context: int, vocabulary: int
) -> list[float]:
    """The median milliseconds of a decode step of each engine; the engines take turns.

    Raises:
        ValueError: there is no room for the rows.
    """
    times: list[list[float]] = [[] for _ in engines]
    output = 2 * (WARM + TIMED)
    for engine in engines:
        engine.add(_alike(rows, context, output, vocabulary))
        await_rows(engine, rows)
    for step in range(WARM + TIMED):
        for engine, own in zip(engines, times, strict=True):
            start = time.perf_counter()
            assert engine.step().tokens == rows
            if step >= WARM:
                own.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(own) for own in times]


class Device(NamedTuple):
    """The device's peak rates: bytes per second, and floating-point operations per second."""

    bandwidth: float
    flops: float

    def decode_ms(self, weights: int, geometry: KVGeometry, rows: int, context: int) -> float:
        """The lower bound of a step's time: all weights and all KV are read once."""
        memory = (weights + geometry.used([context] * rows)) / self.bandwidth
        arithmetic = 2 * rows * (weights / 2) / self.flops
        return max(memory, arithmetic) * 1e3


def _alike(rows: int, context: int, output: int, vocabulary: int) -> list[BenchRequest]:
    """Requests of these lengths, one for each row."""
    load = Load(rows, Range(context, context), Range(output, output), seed=1)
    return [arrival.request for arrival in load.draw(vocabulary)]
