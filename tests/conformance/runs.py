"""The two runs of a schedule: each sequence alone in mlx-lm's caches, and all in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from conformance.driver import Batch
from conformance.schedule import Schedule, Sequence
from conformance.tap import LayerOutput

Take = Callable[[], list[LayerOutput]]


@dataclass(slots=True)
class Record:
    """The results of one sequence.

    Attributes:
        fed: its input tokens.
        logits: by position.
        calls: for each call of a traced layer, the outputs by position.
        layers: the layer number of each call.
    """

    fed: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    calls: list[list[np.ndarray]] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)

    def add(self, row: int, length: int, logits: mx.array, outputs: list[LayerOutput]) -> None:
        """Adds the first ``length`` positions of a row of one step."""
        self.logits.extend(np.array(logits[row, :length].astype(mx.float32)))
        self.layers = [output.layer for output in outputs]
        self.calls = self.calls or [[] for _ in outputs]
        for positions, output in zip(self.calls, outputs, strict=True):
            if output.values.shape[0] == logits.shape[0]:
                positions.extend(output.values[row, :length])


def alone(model: Any, sequence: Sequence, take: Take, chunks: list[int]) -> Record:
    """Runs a sequence in mlx-lm's own caches: its prompt in these chunks, then greedy tokens."""
    record = Record(fed=list(sequence.prompt))
    cache = make_prompt_cache(model)
    rest = len(sequence.prompt) - sum(chunks)
    for length in [*chunks, *[1] * (rest + sequence.decodes)]:
        start = len(record.logits)
        if start == len(record.fed):
            record.fed.append(int(np.argmax(record.logits[-1])))
        logits = model(mx.array([record.fed[start : start + length]]), cache=cache)
        mx.eval(logits)
        record.add(0, length, logits, take())
    return record


def batched(model: Any, schedule: Schedule, fed: list[list[int]], take: Take) -> list[Record]:
    """Runs all sequences in Chairlift's caches with the input tokens of their solo runs."""
    run = _BatchedRun(model, schedule, fed, take)
    states = run.prefill()
    run.decode(states)
    return run.records


class _BatchedRun:
    def __init__(self, model: Any, schedule: Schedule, fed: list[list[int]], take: Take) -> None:
        self._model = model
        self._schedule = schedule
        self._fed = fed
        self._take = take
        self.records = [Record(fed=tokens) for tokens in fed]

    def prefill(self) -> dict[int, Any]:
        """Each sequence's state after its chunks; None if it has no chunks."""
        states: dict[int, Any] = {}
        for group in self._schedule.prefills:
            batch = Batch(self._model)
            chunks = {n: list(self._schedule.sequences[n].chunks) for n in group}
            rows = [n for n in group if chunks[n]]
            states |= {n: None for n in group if not chunks[n]}
            for n in rows:
                batch.join(columns=self._schedule.sequences[n].columns)
            while rows:
                lengths = [chunks[n].pop(0) for n in rows]
                self._step(batch, rows, lengths)
                ended = {
                    i for i, n in enumerate(rows) if not chunks[n] or lengths[i] < max(lengths)
                }
                states |= {rows[i]: batch.extract(i) for i in ended}
                rows = [rows[i] for i in batch.leave(ended)]
        return states

    def decode(self, states: dict[int, Any]) -> None:
        """Sequences join as scheduled, and leave after their last step."""
        batch = Batch(self._model)
        waiting = sorted(states, key=lambda n: self._schedule.sequences[n].join)
        rows: list[int] = []
        step = 0
        while waiting or rows:
            while waiting and self._schedule.sequences[waiting[0]].join <= step:
                n = waiting.pop(0)
                batch.join(states.pop(n), columns=self._schedule.sequences[n].columns)
                rows.append(n)
            step += 1
            if step == 4:
                batch.reserve(rows=6, columns=100)
            if not rows:
                continue
            self._step(batch, rows, [1] * len(rows))
            ended = {
                i for i, n in enumerate(rows) if len(self.records[n].logits) == len(self._fed[n])
            }
            if ended:
                rows = [rows[i] for i in batch.leave(ended)]

    def _step(self, batch: Batch, rows: list[int], lengths: list[int]) -> None:
        starts = [len(self.records[n].logits) for n in rows]
        logits = batch.step(
            [
                self._fed[n][start : start + length]
                for n, start, length in zip(rows, starts, lengths, strict=True)
            ]
        )
        outputs = self._take()
        for row, (n, length) in enumerate(zip(rows, lengths, strict=True)):
            self.records[n].add(row, length, logits, outputs)
