"""``python -m chairlift.loadtest.engine_bench``: compares the engine with mlx-lm's BatchGenerator.

It runs in one process without HTTP, with random weights for any of mlx-lm's architectures. It
measures a mixed load (tokens per second, gaps between decode steps, peak memory) and pure decode
steps at given numbers of rows. The lower bound that the device's memory bandwidth and arithmetic
set for each step is printed as "least".
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from chairlift.engine.cpu.blas import load_fast_blas

load_fast_blas()  # before MLX is imported

# ruff: noqa: E402
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator

from chairlift.cache.capacity import KVGeometry
from chairlift.engine.config import EngineConfig
from chairlift.engine.core.acceleration import Acceleration, accelerate
from chairlift.engine.core.core import EngineCore
from chairlift.engine.core.prepared_model import prepare_model
from chairlift.engine.device.limits import build_limits
from chairlift.engine.device.profile import current
from chairlift.engine.lora.adapters import AdapterLimits
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.model.probe import Probed, probe
from chairlift.loadtest.bench.engine_flags import engine_parser
from chairlift.loadtest.shapes import (
    SHAPES,
    BenchRequest,
    config_of,
    random_adapter,
    random_model,
    random_requests,
)
from chairlift.loadtest.timeline import Timeline, record

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Pure decode steps that are timed, and warm-up steps before them.
TIMED, WARM = 30, 10
PROGRESS_SECONDS = 30.0
# More steps than any engine computes in a second.
MAX_STEPS_PER_SECOND = 2000


class StepResult(NamedTuple):
    """The result of one step: tokens generated, and requests that ended."""

    tokens: int
    ended: int


class Engine(Protocol):
    """An engine that generates one step at a time."""

    def add(self, requests: list[BenchRequest]) -> None:
        """Queues requests."""
        ...

    def step(self) -> StepResult:
        """Computes one step. A step of prefill alone generates no tokens."""
        ...

    @property
    def reserved(self) -> int:
        """Bytes of KV that are allocated now."""
        ...


class Ours:
    """Chairlift's engine without a prefix cache; ``paced`` limits the time of its steps.

    Successive requests have successive ``adapters``.
    """

    def __init__(
        self,
        model: Any,
        probed: Probed,
        acceleration: Acceleration,
        kv_bytes: int,
        rows: int,
        paced: bool,
        adapters: Seq[Path] = (),
    ) -> None:
        config = EngineConfig(max_rows=rows, kv_memory=kv_bytes, prefix_cache_bytes=0)
        geometry, vocabulary, _ = probed
        limits = build_limits(config, current(), geometry, vocabulary, kv_bytes, prefix_bytes=0)
        if not paced:
            limits = replace(limits, step_seconds=math.inf)
        eager, layers = acceleration
        prepared = prepare_model(
            *(model, vocabulary, limits.chunk_multiple, eager),
            layers=layers,
            adapter_limits=AdapterLimits(max_loras=len(adapters)),
        )
        self._core = EngineCore(prepared, limits)
        self._adapters = [folder.name for folder in adapters] or [""]
        for folder in adapters:
            prepared.adapters.load(folder.name, folder)
        self._added = 0
        self.reserved = 0

    def add(self, requests: list[BenchRequest]) -> None:
        for request in requests:
            params = SamplingParams(max_tokens=request.output, seed=0, temperature=0.0)
            adapter = self._adapters[self._added % len(self._adapters)]
            submit = Submit(str(self._added), request.prompt, params, adapter=adapter)
            self._core.submit(submit)
            self._added += 1

    def step(self) -> StepResult:
        output = self._core.step()
        self.reserved = output.stats.kv_reserved_bytes
        ended = sum(token.finish is not None for token in output.outputs)
        return StepResult(sum(len(token.token_ids) for token in output.outputs), ended)


class Peer:
    """mlx-lm's generator, with prompts in batches of 8."""

    def __init__(self, model: Any, rows: int, paced: bool) -> None:
        self._generator = BatchGenerator(model, completion_batch_size=rows, prefill_batch_size=8)

    def add(self, requests: list[BenchRequest]) -> None:
        prompts = [request.prompt for request in requests]
        self._generator.insert(prompts, max_tokens=[request.output for request in requests])

    def step(self) -> StepResult:
        _, generated = self._generator.next()
        return StepResult(
            len(generated), sum(token.finish_reason is not None for token in generated)
        )

    @property
    def reserved(self) -> int:
        return int(self._generator.prompt_cache_nbytes)


@dataclass(slots=True)
class MixedLoad:
    """The measurements of a mixed load.

    Attributes:
        tokens: generated tokens.
        seconds: duration.
        peak_bytes: peak of MLX's memory.
        reserved_bytes: the most KV memory that was allocated.
        gaps: milliseconds between successive steps that generated tokens.
    """

    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    gaps: list[float] = field(default_factory=list)

    def figures(self, weights: int) -> dict[str, float]:
        """The figures to report; ``weights`` is the model's size in bytes."""
        gaps = sorted(self.gaps)
        return {
            "output_tokens_per_s": self.tokens / self.seconds,
            "gap_p50_ms": gaps[len(gaps) // 2],
            "gap_p99_ms": gaps[int(len(gaps) * 0.99)],
            "gap_max_ms": gaps[-1],
            "seconds": self.seconds,
            "peak_gb": self.peak_bytes / 1e9,
            "kv_reserved_gb": self.reserved_bytes / 1e9,
            "peak_over_weights_and_kv": self.peak_bytes / (weights + self.reserved_bytes),
        }


def mixed(engine: Engine, requests: list[BenchRequest], what: str) -> MixedLoad:
    """Submits all requests at once and runs the engine until they have ended."""
    mx.reset_peak_memory()
    load = MixedLoad()
    engine.add(requests)
    ended = 0
    start = last = shown = time.perf_counter()
    while ended < len(requests):
        turn = engine.step()
        now = time.perf_counter()
        if turn.tokens:
            if load.tokens:
                load.gaps.append((now - last) * 1e3)
            last = now
        load.tokens += turn.tokens
        load.reserved_bytes = max(load.reserved_bytes, engine.reserved)
        ended += turn.ended
        if now - shown > PROGRESS_SECONDS:
            print(
                f"{what}: {ended}/{len(requests)} requests, {load.tokens} tokens", file=sys.stderr
            )
            shown = now
    load.seconds = time.perf_counter() - start
    load.peak_bytes = mx.get_peak_memory()
    return load


class Decode(NamedTuple):
    """The median milliseconds of a step, and a timeline of one second of steps if requested."""

    step_ms: float
    timeline: Timeline | None


def decode_step(engine: Engine, rows: int, context: int, vocabulary: int, timeline: bool) -> Decode:
    """Times pure decode steps of ``rows`` rows with prompts of ``context`` tokens."""
    output = WARM + TIMED + (MAX_STEPS_PER_SECOND if timeline else 200)
    requests = list(random_requests(rows, (context, context), (output, output), vocabulary, 1))
    engine.add(requests)
    while engine.step().tokens < rows:
        pass
    times = []
    for step in range(WARM + TIMED):
        start = time.perf_counter()
        assert engine.step().tokens == rows
        if step >= WARM:
            times.append((time.perf_counter() - start) * 1e3)
    return Decode(statistics.median(times), record(engine.step) if timeline else None)


def adapter_steps(engines: Seq[Engine], rows: int, context: int, vocabulary: int) -> list[float]:
    """The median milliseconds of a decode step of each engine; the engines take turns."""
    times: list[list[float]] = [[] for _ in engines]
    output = 2 * (WARM + TIMED)
    for engine in engines:
        engine.add(list(random_requests(rows, (context, context), (output, output), vocabulary, 1)))
        while engine.step().tokens < rows:
            pass
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


def _free_memory() -> None:
    """Frees the last engine's memory, so that it does not count in the next engine's peak."""
    gc.collect()
    mx.clear_cache()


def _bytes_of(model: Any) -> int:
    parameters: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in parameters)


def main() -> int:
    """Measures, prints a table, and writes the figures."""
    options = engine_parser(__doc__, SHAPES, DTYPES).parse_args()
    try:
        config = config_of(options.model)
        model = random_model(config, DTYPES[options.dtype])
    except ValueError as error:
        print(f"engine_bench: {error}", file=sys.stderr)
        return 2
    weights = _bytes_of(model)
    acceleration = accelerate(model)
    probed = probe(model, config["model_type"])
    device = Device(options.bandwidth, options.flops)
    kv_bytes = int(options.kv_gb * 1e9)
    engines: dict[str, Callable[..., Engine]] = {
        "ours": partial(Ours, model, probed, acceleration, kv_bytes),
        "mlx-lm": partial(Peer, model),
    }
    # As in the engine process: a full collection would delay a step.
    gc.freeze()
    report: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
    for name, make in engines.items():
        if options.only not in (None, name):
            continue
        figures: dict[str, Any] = {}
        for rows in options.decode:
            engine = make(rows=rows, paced=False)
            timed = rows in options.timeline
            took, timeline = decode_step(engine, rows, options.context, probed.vocabulary, timed)
            bound = device.decode_ms(weights, probed.geometry, rows, options.context)
            figures[f"decode_{rows}_rows_ms"] = took
            print(f"{name:8} {rows:4} rows: {took:8.2f} ms a step (least {bound:.2f})", flush=True)
            if timeline is not None:
                print(f"{name:8} {rows:4} rows: {timeline.summary}", flush=True)
                figures[f"timeline_{rows}_rows"] = timeline._asdict()
            del engine
            _free_memory()
        if options.requests:
            requests = list(
                random_requests(
                    options.requests,
                    options.prompt_tokens,
                    options.output_tokens,
                    probed.vocabulary,
                    options.seed,
                )
            )
            load = mixed(make(rows=options.rows, paced=True), requests, name)
            figures |= load.figures(weights)
            for key, value in load.figures(weights).items():
                print(f"{name:8} {key:26} {value:10.2f}", flush=True)
            _free_memory()
        report[name] = figures
    with TemporaryDirectory() as folder:
        numbers = range(options.adapters)
        adapters = [random_adapter(model, Path(folder, f"a{n}"), 8, n) for n in numbers]
        for rows in options.decode if adapters else ():
            make = partial(engines["ours"], rows=rows, paced=False)
            pair = [make(), make(adapters=adapters)]
            plain, adapted = adapter_steps(pair, rows, options.context, probed.vocabulary)
            ratio = report[f"adapters_{rows}_rows"] = plain / adapted
            print(f"adapters {rows:4} rows: {plain:.2f} / {adapted:.2f} ms a step = {ratio:.3f}")
            del pair
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
