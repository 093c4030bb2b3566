"""Random operations on a batch that check every token.

Rows join from a prompt or a snapshot, leave, take steps, are rewound and restored, in random order.
Each follows a sequence whose greedy tokens mlx-lm has computed alone; a step that gives another
greedy token is an error.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from support.engine.reference import solo_tokens

from chairlift.cache.kinds import make_batch
from chairlift.cache.snapshot import Snapshot

MAX_ROWS = 6
# Most tokens that a prefill step computes.
CHUNK = 256


@dataclass(slots=True)
class Reference:
    """A prompt with its greedy continuation.

    Attributes:
        tokens: prompt and continuation.
        prompt: tokens of the prompt.
        snapshots: of rows that follow this sequence, to join and restore from.
    """

    tokens: list[int]
    prompt: int
    snapshots: list[Snapshot] = field(default_factory=list)


class Soak:
    """A batch, and the sequence that each of its rows follows.

    Attributes:
        done: operations that were done, by name.
        refused: rewinds that the batch refused.
    """

    def __init__(self, model: Any, prompts: list[list[int]], new: int, seed: int) -> None:
        self.model = model
        self.random = random.Random(seed)
        self.references = [Reference([*p, *solo_tokens(model, p, new)], len(p)) for p in prompts]
        self.batch = make_batch(model)
        self.rows: list[Reference] = []
        self.done: dict[str, int] = {}
        self.refused = 0

    def run(self, operations: int) -> None:
        """Runs this many random operations."""
        for i in range(operations):
            name = self.random.choices(
                ["step", "join", "leave", "keep", "rewind", "restore"], [6, 2, 1, 1, 1, 1]
            )[0]
            if getattr(self, f"_{name}")():
                self.done[name] = self.done.get(name, 0) + 1
            self.batch.check_integrity()
            if i % 50 == 49:
                print(f"{i + 1}/{operations} operations, {self.done}", file=sys.stderr, flush=True)

    def _step(self) -> bool:
        ended = {row for row, s in enumerate(self.rows) if self._at(row) >= len(s.tokens) - 1}
        self._remove(ended)
        if not self.rows:
            return False
        inputs = [s.tokens[self._at(row)] for row, s in enumerate(self.rows)]
        with self.batch.step(1):
            logits = self.model(mx.array(inputs)[:, None], cache=self.batch.layers)[:, -1]
        mx.eval(logits, self.batch.state)
        chosen: Any = mx.argmax(logits, axis=-1).tolist()
        for row, (reference, token) in enumerate(zip(self.rows, chosen, strict=True)):
            at = self._at(row)
            if at >= reference.prompt:
                assert token == reference.tokens[at], (row, at, token, reference.tokens[at])
        return True

    def _join(self) -> bool:
        if len(self.rows) == MAX_ROWS:
            return False
        reference = self.random.choice(self.references)
        saved = self.random.choice([None, *reference.snapshots])
        self.batch.join(saved or self._prefilled(reference))
        self.rows.append(reference)
        return True

    def _leave(self) -> bool:
        return self._remove({self.random.randrange(len(self.rows))} if self.rows else set())

    def _keep(self) -> bool:
        if not self.rows:
            return False
        row = self.random.randrange(len(self.rows))
        snapshot = self.batch.extract(row).copy()
        mx.eval(snapshot.arrays)
        self.rows[row].snapshots = [*self.rows[row].snapshots[-3:], snapshot]
        return True

    def _rewind(self) -> bool:
        if not self.rows:
            return False
        row = self.random.randrange(len(self.rows))
        at = self._at(row)
        target = max(0, at - self.random.choice([0, 1, 2, 5, 20, at]))
        rewound = self.batch.rewind(row, target)
        mx.eval(self.batch.take_moves(), self.batch.state)
        assert self._at(row) == (target if rewound else at)
        self.refused += not rewound
        return rewound

    def _restore(self) -> bool:
        kept = [row for row, reference in enumerate(self.rows) if reference.snapshots]
        if not kept:
            return False
        row = self.random.choice(kept)
        snapshot = self.random.choice(self.rows[row].snapshots)
        self.batch.restore(row, snapshot)
        assert self._at(row) == snapshot.stop
        return True

    def _at(self, row: int) -> int:
        return self.batch.offsets[row]

    def _remove(self, rows: set[int]) -> bool:
        order = self.batch.leave(rows)
        mx.eval(self.batch.take_moves())
        self.rows = [self.rows[row] for row in order]
        return bool(rows)

    def _prefilled(self, reference: Reference) -> Snapshot:
        """The state after all of a prompt but its last token, computed in chunks of random size."""
        prompts = make_batch(self.model)
        prompts.join(columns=reference.prompt)
        while (start := prompts.offsets[0]) < reference.prompt - 1:
            size = self.random.randint(1, min(CHUNK, reference.prompt - 1 - start))
            with prompts.step(size):
                self.model(mx.array([reference.tokens[start : start + size]]), cache=prompts.layers)
            mx.eval(prompts.state)
        return prompts.extract(0)
