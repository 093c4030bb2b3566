"""The check of one model file: a sequence has the same logits in a batch as alone."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, make_prompt_cache

from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.model.adapters import ADAPTED
from conformance.configs import reason_not_applicable
from conformance.driver import Batch, UnsupportedKind
from conformance.restored import restored
from conformance.runs import Record, alone, batched
from conformance.schedule import Schedule, random_schedule
from conformance.tap import tapped
from conformance.values import VOCAB, WINDOW
from conformance.weights import tiny_model

Outcome = Literal["passed", "failed", "not applicable"]

# Relative to the largest logit. Rounding in float32 makes errors of some 1e-6, a wrong mask 1e-2.
TOLERANCE = 2e-3
SEEDS = (0, 1)
_OWN_CHUNKS = "mlx-lm alone gives other logits for other chunks of the prompt"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one model file; ``detail`` says why it did not pass."""

    name: str
    outcome: Outcome
    caches: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Difference:
    """The difference between two runs of a sequence.

    Attributes:
        position: the first position that differs.
        error: the largest error at any position.
        tokens: how many greedy tokens differ.
        layer: the first layer that differs at ``position``, if layers were traced.
    """

    position: int
    error: float
    tokens: int
    layer: int | None

    def __str__(self) -> str:
        return f"logits differ by {self.error:.1g} of the largest, {self.tokens} greedy tokens"


@dataclass(slots=True)
class _Findings:
    """Differences and notes of all schedules of a model."""

    differences: list[str] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)


def check(name: str, seeds: tuple[int, ...] = SEEDS) -> Result:
    """Runs one model file alone and in a batch on the CPU, once for each seed."""
    with mx.stream(mx.cpu):
        return _check(name, seeds)


def _check(name: str, seeds: tuple[int, ...]) -> Result:
    reason = reason_not_applicable(name)
    try:
        model = tiny_model(name)
        unfit = _unfit_for_comparison(model)
    except (Exception, SystemExit) as error:
        model, unfit = None, where(error)
    caches = _cache_names(model) if model is not None and not unfit else ""
    if unfit and reason:
        return Result(name, "not applicable", caches, f"{reason} ({unfit})")
    if unfit:
        return Result(name, "failed", caches, f"mlx-lm alone: {unfit}")
    if reason:
        return Result(name, "failed", caches, f"runs, although it is listed as: {reason}")
    findings = _Findings()
    if any(type(part).__module__.rpartition(".")[2] in ADAPTED for part in model.modules()):
        findings.notes.add("adapted (engine/model/adapters)")
    try:
        solo = [_check_schedule(model, seed, findings) for seed in seeds]
        _check_accelerated(model, seeds[0], solo[0], findings)
    except UnsupportedKind as error:
        return Result(name, "failed", caches, str(error))
    except Exception as error:
        return Result(name, "failed", caches, where(error))
    details = findings.differences[:1] + sorted(findings.notes)
    outcome: Outcome = "failed" if findings.differences else "passed"
    return Result(name, outcome, caches, "; ".join(details))


def _unfit_for_comparison(model: Any) -> str | None:
    """Why a model's own logits cannot serve as a reference; None if they can.

    Raises:
        Exception: the model does not run.
    """
    changed = 2 * WINDOW - 3
    first = np.random.default_rng(0).integers(VOCAB, size=2 * WINDOW)
    second = first.copy()
    second[changed] = (second[changed] + 1) % VOCAB
    before, after = (
        np.array(model(mx.array(tokens[None]), cache=make_prompt_cache(model))[0])
        for tokens in (first, second)
    )
    if np.isnan(before).any() or np.isnan(after).any():
        return "its logits are not numbers"
    if _error(before[:changed], after[:changed]) > TOLERANCE:
        return "a token of the prompt changes the logits before it"
    if _error(before[-1], after[-1]) < 2 * TOLERANCE:
        return "a token does not matter to the second one after it"
    if len(set(np.argmax(before, axis=-1).tolist())) < 4:
        return "it says fewer than four tokens"
    return None


def _check_schedule(model: Any, seed: int, findings: _Findings) -> list[Record]:
    """Returns the records of the sequences alone."""
    schedule = random_schedule(seed, pads=Batch(model).pads)
    solo, together = _both(model, schedule, trace=False)
    if not _differing(solo, together):
        return solo
    # Once more, with the outputs of the layers.
    solo, together = _both(model, schedule, trace=True)
    for number, difference in _differing(solo, together).items():
        sequence = schedule.sequences[number]
        one_by_one = alone(model, sequence, list, [1] * sequence.prefilled)
        if _difference(solo[number], one_by_one):
            findings.notes.add(_OWN_CHUNKS)
            if not _difference(one_by_one, together[number]):
                continue
        findings.differences.append(_describe(model, schedule, number, difference))
    return solo


def _check_accelerated(model: Any, seed: int, solo: list[Record], findings: _Findings) -> None:
    """Runs the batch once more with the engine's accelerations for this device."""
    schedule = random_schedule(seed, pads=Batch(model).pads)
    with restored():
        accelerate(model)
        together = batched(model, schedule, [record.fed for record in solo], list)
    if _OWN_CHUNKS not in findings.notes:
        for number, difference in _differing(solo, together).items():
            findings.differences.append(f"accelerated, sequence {number}: {difference}")


def _both(model: Any, schedule: Schedule, trace: bool) -> tuple[list[Record], list[Record]]:
    with tapped(list(model.layers) if trace else []) as take:
        solo = [alone(model, s, take, s.chunks) for s in schedule.sequences]
        return solo, batched(model, schedule, [record.fed for record in solo], take)


def _differing(solo: list[Record], together: list[Record]) -> dict[int, _Difference]:
    pairs = enumerate(zip(solo, together, strict=True))
    found = {number: _difference(*records) for number, records in pairs}
    return {number: difference for number, difference in found.items() if difference}


def _difference(expected: Record, got: Record) -> _Difference | None:
    """None if all logits are equal within the tolerance."""
    theirs, ours = np.array(expected.logits), np.array(got.logits)
    assert theirs.shape == ours.shape, (theirs.shape, ours.shape)
    wrong = [p for p in range(len(theirs)) if not _error(theirs[p], ours[p]) <= TOLERANCE]
    if not wrong:
        return None
    tokens = sum(
        np.argmax(theirs[p]) != np.argmax(ours[p]) and _margin(theirs[p]) > TOLERANCE
        for p in range(len(theirs))
    )
    errors = [_error(theirs[p], ours[p]) for p in wrong]
    return _Difference(wrong[0], float(np.max(errors)), tokens, _first_layer(expected, got, wrong))


def _first_layer(expected: Record, got: Record, positions: list[int]) -> int | None:
    """The first traced layer that differs at the first of these positions."""
    calls = zip(expected.layers, expected.calls, got.calls, strict=False)
    for layer, theirs, ours in calls:
        traced = min(len(theirs), len(ours)) > positions[0]
        if traced and not _error(theirs[positions[0]], ours[positions[0]]) <= TOLERANCE / 2:
            return layer
    return None


def _describe(model: Any, schedule: Schedule, number: int, difference: _Difference) -> str:
    sequence = schedule.sequences[number]
    phase = "prefill" if difference.position < sequence.prefilled else "decode"
    if phase == "prefill" and any(number in g and len(g) > 1 for g in schedule.prefills):
        phase = "padded prefill"
    where = f"from {phase}, position {difference.position} on"
    layer = difference.layer
    if layer is not None:
        caches = make_prompt_cache(model)
        kind = f" ({_name(caches[layer])})" if len(caches) == len(model.layers) else ""
        where = f"layer {layer}{kind}, {where}"
    return f"{where}: {difference}"


def _error(expected: np.ndarray, actual: np.ndarray) -> float:
    """The largest absolute difference relative to the largest expected value; inf for NaN."""
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(actual)):
        return float("inf")
    scale = max(float(np.abs(expected[finite]).max(initial=0.0)), 1e-30)
    return float(np.abs(expected[finite] - actual[finite]).max(initial=0.0)) / scale


def _margin(logits: np.ndarray) -> float:
    """The distance of the two largest logits, relative to the largest absolute logit."""
    second, first = np.sort(logits)[-2:]
    return float((first - second) / np.abs(logits[np.isfinite(logits)]).max())


def _cache_names(model: Any) -> str:
    counts = Counter(_name(cache) for cache in make_prompt_cache(model))
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _name(cache: Any) -> str:
    if isinstance(cache, CacheList):
        return f"CacheList({', '.join(_name(part) for part in cache.caches)})"
    return type(cache).__name__


def where(error: BaseException) -> str:
    """An exception in one line, with the lines of the model file and the cache that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "mlx_lm" in f.filename or "/cache/" in f.filename]
    shown = [f for f in ours if "mlx_lm" in f.filename][-1:] + ours[-1:]
    places = dict.fromkeys(f"{Path(frame.filename).name}:{frame.lineno}" for frame in shown)
    return f"{text} at {', '.join(places)}" if places else text
